import pytest
import torch

from data_pipeline.batch import Batch
from data_pipeline.packed_text import next_tokens

EOD = 9
# Document ends inside a sequence, at its edges, side by side, and before and at the edge of a shard.
SEQUENCES = torch.tensor(
    [
        [1, 2, 9, 3, 4, 5, 6, 9, 7, 8, 1, 2, 3],
        [9, 1, 9, 9, 2, 3, 4, 5, 6, 7, 8, 9, 1],
        [1, 1, 1, 1, 1, 9, 2, 2, 2, 2, 2, 2, 9],
    ]
)


def document_positions() -> torch.Tensor:
    """Position of each token in its document, as computed from the files' index."""
    positions = torch.zeros_like(SEQUENCES)
    for column in range(1, SEQUENCES.shape[1]):
        positions[:, column] = torch.where(SEQUENCES[:, column - 1] == EOD, 0, positions[:, column - 1] + 1)
    return positions


def full_batch(isolate: bool = True) -> Batch:
    return next_tokens(SEQUENCES, document_positions(), isolate)


def cp_shard(rank: int, size: int, isolate: bool = True) -> Batch:
    """A context-parallel shard of `full_batch()`, computed from its own tokens and positions."""
    length = 12 // size
    start, end = rank * length, (rank + 1) * length
    return next_tokens(
        SEQUENCES[:, start : end + 1], document_positions()[:, start : end + 1], isolate, start
    )


def test_labels_are_the_next_tokens():
    assert torch.equal(full_batch().tokens, SEQUENCES[:, :-1])
    assert torch.equal(full_batch().labels, SEQUENCES[:, 1:])


def test_positions_restart_after_every_end_of_document():
    assert full_batch().positions.tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3],
        [0, 0, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5],
    ]


def test_the_first_token_of_a_document_does_not_count_as_label_but_its_end_does():
    batch = full_batch()
    assert torch.equal(batch.loss_mask, batch.tokens != EOD)
    assert batch.labels[0, 1] == EOD


def test_without_isolation_a_sequence_is_one_document():
    batch = full_batch(isolate=False)
    assert batch.positions.tolist() == [list(range(12))] * 3
    assert batch.loss_mask.all()
    assert batch.cu_seqlens.tolist() == [0, 12, 24, 36]


def test_cu_seqlens_are_the_document_starts_and_the_end():
    batch = full_batch()
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 3, 8, 12, 13, 15, 16, 24, 30, 36]
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        assert batch.positions.flatten()[start:end].tolist() == list(range(end - start))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("isolate", [True, False])
def test_context_parallel_shards_concatenate_to_the_full_batch(size: int, isolate: bool):
    shards = [cp_shard(rank, size, isolate) for rank in range(size)]
    for name in ("tokens", "labels", "loss_mask", "positions"):
        assert torch.equal(
            torch.cat([getattr(cp_shard, name) for cp_shard in shards], 1), getattr(full_batch(isolate), name)
        )


def test_the_last_label_of_a_shard_is_the_first_token_of_the_next():
    left, right = (cp_shard(rank, 2) for rank in range(2))
    assert torch.equal(left.labels[:, -1], right.tokens[:, 0])
    assert torch.equal(right.labels[:, -1], SEQUENCES[:, -1])


def test_positions_continue_across_shards():
    right = cp_shard(1, 2)
    assert right.positions[0].tolist() == [3, 4, 0, 1, 2, 3]
    # Sequence 0 continues and starts at 2; sequence 1 continues all along; sequence 2 starts at its first token, 12.
    assert right.cu_seqlens.tolist() == [2, 12, 18]


def test_moving_a_batch_to_a_device_preserves_it():
    moved = full_batch().to("cpu")
    assert torch.equal(moved.tokens, full_batch().tokens)
    assert moved.loss_mask.dtype == torch.bool
