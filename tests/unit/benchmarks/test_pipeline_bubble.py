"""The counted idle shares of pipeline schedules are those of the formulas, where there is one."""

import pytest

from benchmarks.pipeline_bubble import shares


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_idle_shares_are_those_of_the_formulas(ranks, micro_batches):
    plain, two, four, dual = shares(ranks, micro_batches)
    for share, chunks in ((plain, 1), (two, 2), (four, 4)):
        assert share == pytest.approx((ranks - 1) / (chunks * micro_batches + ranks - 1))
    # Its two chunks are on ranks in opposite orders, so a rank waits as in neither of the others.
    assert two <= dual < plain
