import pytest

from megakernel.config import InUse, UserError
from megakernel.parallel.ranks import RankFailed, Ranks

from .threads import on_ranks


def test_only_rank_0_acts_and_all_ranks_get_its_result():
    acted = []

    def work(ranks: Ranks):
        return ranks.on_rank_zero(lambda: acted.append(ranks.rank) or "found")

    assert on_ranks(3, work) == ["found"] * 3
    assert acted == [0]


@pytest.mark.parametrize("kind", [ValueError, PermissionError, InUse])
def test_an_error_of_rank_0_is_raised_on_all_ranks(kind):
    def refuse():
        raise kind("run.root is not writable")

    outcomes = on_ranks(3, lambda ranks: ranks.on_rank_zero(refuse))
    assert {(type(error), str(error)) for error in outcomes} == {(kind, "run.root is not writable")}


def test_a_user_error_of_one_rank_is_raised_on_all_ranks():
    def work(ranks: Ranks):
        def act():
            if ranks.rank >= refuses:
                raise UserError(f"layer {ranks.rank} has no weights")
            return ranks.rank

        return ranks.each(act)

    refuses = 3
    assert on_ranks(3, work) == [0, 1, 2]
    refuses = 1
    assert [(type(error), str(error)) for error in on_ranks(3, work)] == [
        (UserError, "layer 1 has no weights")
    ] * 3


def test_a_failure_of_one_rank_is_raised_on_all_ranks_and_names_the_rank():
    def work(ranks: Ranks):
        def act():
            if ranks.rank == 2:
                raise RuntimeError("the disk fell over")

        ranks.all(act)

    outcomes = on_ranks(3, work)
    assert all(isinstance(error, RankFailed) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
    assert "rank 2" in str(outcomes[0])
    assert "the disk fell over" in str(outcomes[0])


def test_the_result_of_rank_0_is_broadcast_if_possible():
    def gather(value):
        raise AssertionError("gathered instead of broadcast")

    assert Ranks(0, 2, gather, lambda value: value).on_rank_zero(lambda: 7) == 7
    assert Ranks(1, 2, gather, lambda value: 7).on_rank_zero(lambda: 8) == 7


def test_a_single_process_needs_no_collective():
    assert Ranks().on_rank_zero(lambda: 7) == 7
    Ranks().all(lambda: None)
