import torch

from megakernel.ops.documents import (
    began_before,
    open_documents,
    positions_from_cu_seqlens,
    reversed_positions,
)


def test_positions_count_from_the_listed_starts():
    positions = positions_from_cu_seqlens(torch.tensor([0, 2, 5, 9, 10]), 2, 5)
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]


def test_a_row_without_its_own_start_continues():
    positions = positions_from_cu_seqlens(torch.tensor([2, 6]), 2, 3)
    places = torch.arange(3)
    # A position beyond the place in the sequence lies in a document that began before it.
    assert (positions > places).tolist() == [[True, True, False], [True, True, True]]


def test_documents_stay_open_where_nothing_starts_inside():
    positions = torch.tensor([[4, 5, 6], [1, 2, 0], [3, 0, 1], [0, 1, 2]])
    assert open_documents(positions, 3, 4, positions.device).tolist() == [True, False, False, False]
    assert open_documents(7, 3, 2, positions.device).tolist() == [True, True]
    assert open_documents(0, 3, 2, positions.device).tolist() == [False, False]


def test_reversed_positions_are_those_of_the_row_read_backwards():
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 0, 0, 1, 2]])
    assert reversed_positions(positions).tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]]


def test_read_backwards_the_last_document_may_have_begun_before_the_row():
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 6, 7, 8, 9]])
    backwards = reversed_positions(positions, continued=True)
    assert began_before(backwards, 5, positions.device).tolist() == [
        [True, True, False, False, False],
        [True] * 5,
    ]
    assert backwards[0, 2:].tolist() == [0, 1, 2]
