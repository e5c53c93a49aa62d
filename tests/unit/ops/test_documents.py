import gc

import torch

from megakernel.ops.documents import (
    began_before,
    cached_for_positions,
    open_documents,
    positions_from_cu_seqlens,
    reversed_positions,
)


def test_positions_count_from_the_listed_starts():
    positions = positions_from_cu_seqlens(torch.tensor([0, 2, 5, 9, 10]), 2, 5)
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]


def test_a_sequence_without_a_start_continues_a_document():
    positions = positions_from_cu_seqlens(torch.tensor([2, 6]), 2, 3)
    places = torch.arange(3)
    # A token whose position exceeds its index is in a document that began before the sequence.
    assert (positions > places).tolist() == [[True, True, False], [True, True, True]]


def test_documents_stay_open_where_nothing_starts_inside():
    positions = torch.tensor([[4, 5, 6], [1, 2, 0], [3, 0, 1], [0, 1, 2]])
    assert open_documents(positions, 3, 4, positions.device).tolist() == [True, False, False, False]
    assert open_documents(7, 3, 2, positions.device).tolist() == [True, True]
    assert open_documents(0, 3, 2, positions.device).tolist() == [False, False]


def test_reversed_positions_are_those_of_the_reversed_sequence():
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 0, 0, 1, 2]])
    assert reversed_positions(positions).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]]


def test_a_continued_last_document_begins_before_the_reversed_sequence():
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 6, 7, 8, 9]])
    backwards = reversed_positions(positions, continued=True)
    assert began_before(backwards, 5, positions.device).tolist() == [
        [True, True, False, False, False],
        [True] * 5,
    ]
    assert backwards[0, 2:].tolist() == [0, 1, 2]


class Maker:
    """Computes a tensor from positions, and counts the calls."""

    calls = 0

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return positions + 1


def test_values_are_cached_until_positions_change():
    make, positions = Maker(), torch.tensor([[0, 1, 0]])
    first = cached_for_positions(positions, "name", make)
    assert cached_for_positions(positions, "name", make) is first
    assert cached_for_positions(positions, "other name", make) is not first
    positions += 4
    assert cached_for_positions(positions, "name", make).tolist() == [[5, 6, 5]]
    assert make.calls == 3


def test_equal_positions_of_another_micro_batch_have_their_own():
    make, positions = Maker(), torch.tensor([[0, 1, 0]])
    first = cached_for_positions(positions, "name", make)
    whole = cached_for_positions(positions.clone(), "name", make)
    assert whole is not first
    # The cache holds two tensors of positions: a shard's, and those of the whole sequences gathered from it.
    assert cached_for_positions(positions, "name", make) is first


def test_cached_values_are_freed_with_their_positions():
    positions, large = torch.tensor([[0, 1, 0]]), torch.zeros(1)
    cached_for_positions(positions, "name", lambda _: large)
    referrers = len(gc.get_referrers(large))
    del positions
    assert len(gc.get_referrers(large)) == referrers - 1


def test_inference_leaves_nothing_that_training_cannot_use():
    make, positions = Maker(), torch.tensor([[0, 1, 0]])
    with torch.inference_mode():
        cached_for_positions(positions, "name", make)
        cached_for_positions(torch.tensor([[0, 1]]), "name", make)
    weight = torch.ones(3, requires_grad=True)
    (weight * cached_for_positions(positions, "name", make)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 2, 1]
