import pytest
import torch

from data_pipeline.batch import Batch
from data_pipeline.packed_text import next_tokens

EOD = 9
# Three documents in one sequence; ends at the edges and side by side; an end before and at the edge of a shard.
ROWS = torch.tensor(
    [
        [1, 2, 9, 3, 4, 5, 6, 9, 7, 8, 1, 2, 3],
        [9, 1, 9, 9, 2, 3, 4, 5, 6, 7, 8, 9, 1],
        [1, 1, 1, 1, 1, 9, 2, 2, 2, 2, 2, 2, 9],
    ]
)


def places() -> torch.Tensor:
    """Of the tokens in their documents, as the files' index tells them."""
    found = torch.zeros_like(ROWS)
    for at in range(1, ROWS.shape[1]):
        found[:, at] = torch.where(ROWS[:, at - 1] == EOD, 0, found[:, at - 1] + 1)
    return found


def whole(isolate: bool = True) -> Batch:
    return next_tokens(ROWS, places(), isolate)


def cp_shard(rank: int, size: int, isolate: bool = True) -> Batch:
    """A shard of whole(), made of its own tokens and places."""
    length = 12 // size
    start, end = rank * length, (rank + 1) * length
    return next_tokens(ROWS[:, start : end + 1], places()[:, start : end + 1], isolate, start)


def test_labels_are_the_next_tokens():
    assert torch.equal(whole().tokens, ROWS[:, :-1])
    assert torch.equal(whole().labels, ROWS[:, 1:])


def test_positions_start_again_after_every_end_of_a_document():
    assert whole().positions.tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3],
        [0, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
    ]


def test_the_first_token_of_a_document_is_no_label_but_its_end_is():
    batch = whole()
    assert torch.equal(batch.loss_mask, batch.tokens != EOD)
    assert batch.labels[0, 1] == EOD


def test_documents_that_are_not_isolated_are_one_sequence():
    batch = whole(isolate=False)
    assert batch.positions.tolist() == [list(range(12))] * 3
    assert batch.loss_mask.all()
    assert batch.cu_seqlens.tolist() == [0, 12, 24, 36]


def test_cu_seqlens_are_the_document_starts_and_the_end():
    batch = whole()
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 12, 13, 15, 16, 24, 30, 36]
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        assert batch.positions.flatten()[start:end].tolist() == list(range(end - start))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("isolate", [True, False])
def test_shards_put_together_are_the_whole(size: int, isolate: bool):
    shards = [cp_shard(rank, size, isolate) for rank in range(size)]
    for name in ("tokens", "labels", "loss_mask", "positions"):
        assert torch.equal(
            torch.cat([getattr(cp_shard, name) for cp_shard in shards], 1), getattr(whole(isolate), name)
        )


def test_the_last_label_of_a_shard_is_the_first_token_of_the_next():
    left, right = (cp_shard(rank, 2) for rank in range(2))
    assert torch.equal(left.labels[:, -1], right.tokens[:, 0])
    assert torch.equal(right.labels[:, -1], ROWS[:, -1])


def test_a_document_begun_on_an_earlier_shard_does_not_start_again():
    right = cp_shard(1, 2)
    assert right.positions[0].tolist() == [3, 4, 0, 1, 2, 3]
    # Sequence 0 continues and starts at 2; sequence 1 continues all along; sequence 2 starts at its first token, 12.
    assert right.cu_seqlens.tolist() == [2, 12, 18]


def test_moving_a_batch_keeps_it():
    moved = whole().to("cpu")
    assert torch.equal(moved.tokens, whole().tokens)
    assert moved.loss_mask.dtype == torch.bool
