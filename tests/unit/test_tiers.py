import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import pytest

from tests.tiers import covering, mark_tiers, tiered

CASES = [dict(zip("abc", values)) for values in product(range(3), range(2), range(4))]


def covered(cases, *names):
    return {tuple(case[name] for name in names) for case in cases}


def test_covering_1_selects_cases_with_every_value():
    few = [CASES[number] for number in covering(CASES, 1)]
    assert len(few) == 4
    assert all(covered(few, name) == covered(CASES, name) for name in "abc")


def test_covering_2_selects_cases_with_every_pair_of_values():
    few = [CASES[number] for number in covering(CASES, 2)]
    assert 12 <= len(few) < len(CASES)
    assert all(covered(few, *pair) == covered(CASES, *pair) for pair in ("ab", "ac", "bc"))


def test_covering_2_ignores_pairs_that_no_case_has():
    cases_without_equal_values = [case for case in CASES if case["a"] != case["b"]]
    assert covered(
        (cases_without_equal_values[number] for number in covering(cases_without_equal_values, 2)), "a", "b"
    ) == covered(cases_without_equal_values, "a", "b")


class Item:
    """A case of a test marked `covering(1, 2)`, as pytest collects it."""

    def __init__(self, **params):
        self.nodeid, self.callspec = f"test[{params}]", SimpleNamespace(params=params)
        self.marks = {"covering": pytest.mark.covering(1, 2).mark}

    def get_closest_marker(self, name):
        return self.marks.get(name)

    def add_marker(self, name):
        self.marks[name] = name


def test_covering_1_and_2_leaves_out_cases_that_show_no_new_pair(monkeypatch):
    monkeypatch.delenv("MEGAKERNEL_TEST_GRID", raising=False)
    items = [Item(**case) for case in CASES]
    left_out = mark_tiers(items)
    both = [item for item in items if item not in left_out]
    first = [item.callspec.params for item in both if "second" not in item.marks]
    assert len(first) == 4 < len(both) < len(items)
    assert all(covered(first, name) == covered(CASES, name) for name in "abc")
    kept = [item.callspec.params for item in both]
    assert all(covered(kept, *pair) == covered(CASES, *pair) for pair in ("ab", "ac", "bc"))
    monkeypatch.setenv("MEGAKERNEL_TEST_GRID", "full")
    assert mark_tiers([Item(**case) for case in CASES]) == []


def test_cases_that_are_not_named_belong_to_the_second_tier():
    one, two = tiered([(1, "x"), (2, "y")], [(1, "x")])
    assert one == (1, "x")
    assert (two.values, [mark.name for mark in two.marks]) == ((2, "y"), ["second"])


def test_an_unknown_first_tier_case_is_refused_by_name():
    with pytest.raises(AssertionError, match=r"no such cases: .*tp3"):
        tiered(["tp2"], ["tp3"])


@pytest.mark.parametrize(("minutes", "counts"), [("0", {"passed": 1, "skipped": 1}), ("9", {"passed": 2})])
def test_only_tests_of_the_second_tier_are_skipped_when_its_minutes_are_over(minutes, counts):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "tier_samples", __file__]
    done = subprocess.run([*command, "--second-tier-minutes", minutes], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for outcome, count in counts.items():
        assert f"{count} {outcome}" in done.stdout
    assert ("of the second tier, whose 0 minutes are over" in done.stdout) == (minutes == "0")


def test_tier_samples_first():
    """Always runs."""


@pytest.mark.second
def test_tier_samples_second():
    """Runs as long as the second tier has time."""
