"""The page of attention benchmarks, from given numbers."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.attention.cases import Case
from benchmarks.kernels.attention.check import LargestError
from benchmarks.kernels.attention.clock import Peak, Times
from benchmarks.kernels.attention.machine import Machine
from benchmarks.kernels.attention.measuring import CaseResult, SuiteResult
from benchmarks.kernels.attention.page import measured_page, number
from benchmarks.kernels.attention.suites import SUITES
from benchmarks.kernels.attention.targets import DEFAULT

CPU = torch.device("cpu")
RIGHT = LargestError(3e-7, "output", 1e-5)


def row(name, seconds, mebibytes, share=0.25):
    peak = Peak(mebibytes * 2**19, mebibytes * 2**20)
    return CaseResult(name, RIGHT, Times(seconds / 2, seconds, peak, forward_share=0.5, both_share=share))


def page(*results):
    """A page from pairs of (tokens, rows)."""
    machine = Machine("a device", bandwidth=2e9, peak=3e12, source="measured here")
    survey = SuiteResult(SUITES["cpu"], machine, torch.float32, repeats=3)
    survey.results = [(Case(1, tokens, 4, 64), list(rows)) for tokens, rows in results]
    return measured_page(survey, CPU, "python -m benchmarks.kernels.attention")


def test_a_row_has_times_memory_utilization_and_the_ratio_to_the_baseline():
    text = page((1024, [row("FLuRKA", 0.5, 30), row("SDPA", 2.0, 10)]))
    assert "| FLuRKA | 250 | 500 | 15 | 30 | 50% | 25% | 0.25x |  |  | 3.0e-07 |" in text
    assert "over 2 GB/s and the least FLOPs over 3 TFLOP/s (measured here)" in text
    assert "* FLuRKA: faster than SDPA from N = 1,024 on." in text


def test_time_per_doubling_is_relative_to_half_the_tokens():
    text = page((1024, [row("FLuRKA", 0.5, 30)]), (2048, [row("FLuRKA", 1.05, 54)]))
    assert "| 2.10x | 1.80x |" in text
    assert (
        "* FLuRKA: a doubling of N costs at most 2.10x in time (to N = 2,048) and 1.80x in memory (to N = 2,048): "
        "linear." in text
    )


def test_a_doubling_that_costs_more_is_not_called_linear():
    text = page((1024, [row("FLuRKA", 0.5, 30)]), (2048, [row("FLuRKA", 1.2, 54)]))
    assert "2.40x in time (to N = 2,048) and 1.80x in memory (to N = 2,048): more than 2.2x." in text


def test_faster_from_a_length_on_means_at_all_longer_ones():
    both = [
        (n, [row("FLuRKA", seconds, 30), row("SDPA", 1.0, 10)]) for n, seconds in ((1024, 0.5), (2048, 1.5))
    ]
    assert "faster than SDPA" not in page(*both)
    assert "faster than SDPA from N = 4,096 on" in page(
        *both, (4096, [row("FLuRKA", 0.5, 30), row("SDPA", 1.0, 10)])
    )


def test_implementations_without_times_are_named_with_the_reason():
    missing = replace(row("SDPA", 1.0, 1), times=None, problem="out of memory")
    text = page((1024, [row("FLuRKA", 0.5, 30), missing]))
    assert "* SDPA: out of memory" in text
    assert "| SDPA" not in text


def test_targets_show_their_worst_case_and_whether_it_meets_the_bound():
    short, rows, long = Case(1, 2**14, 16, 128), Case(4, 2**12, 16, 128), Case(1, 2**20, 16, 128)
    figures = {
        ("kernel elu", short): row("", 1.0, 2, share=0.6).times,
        ("fla chunk", short): row("", 2.5, 2).times,
        ("kernel elu", rows): row("", 1.0, 2, share=0.6).times,
        ("fla chunk", rows): row("", 1.9, 2).times,
        ("kernel elu", long): row("", 69.0, 2, share=0.49).times,
        ("fla chunk", long): row("", 210.0, 9).times,
    }
    rows_of_targets = [target.cells(figures, (short, rows, long)) for target in DEFAULT]
    assert [cells[1:] for cells in rows_of_targets if cells[2] != "—"] == [
        ["at least 2", "1.90", "no"],
        ["at least 3", "3.04", "yes"],
        ["at most 0.25", "0.22", "yes"],
        ["at least 0.5", "0.49", "no"],
        ["at most 70", "69.00", "yes"],
    ]


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (1234.5, "1,234")])
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert number(value) == text
