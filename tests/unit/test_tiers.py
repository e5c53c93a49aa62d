from itertools import product

import pytest

from tests.tiers import covering, tiered

CASES = [dict(zip("abc", values)) for values in product(range(3), range(2), range(4))]


def shown(cases, *names):
    return {tuple(case[name] for name in names) for case in cases}


def test_few_cases_show_every_value():
    few = [CASES[number] for number in covering(CASES, 1)]
    assert len(few) == 4
    assert all(shown(few, name) == shown(CASES, name) for name in "abc")


def test_few_cases_show_every_pair_of_values():
    few = [CASES[number] for number in covering(CASES, 2)]
    assert 12 <= len(few) < len(CASES)
    assert all(shown(few, *pair) == shown(CASES, *pair) for pair in ("ab", "ac", "bc"))


def test_a_pair_that_no_case_shows_is_not_missed():
    lame = [case for case in CASES if case["a"] != case["b"]]
    assert shown((lame[number] for number in covering(lame, 2)), "a", "b") == shown(lame, "a", "b")


def test_cases_that_are_not_first_are_of_the_second_tier():
    one, two = tiered([(1, "x"), (2, "y")], [(1, "x")])
    assert one == (1, "x")
    assert (two.values, [mark.name for mark in two.marks]) == ((2, "y"), ["second"])


def test_a_first_case_that_is_none_is_named():
    with pytest.raises(AssertionError, match=r"no such cases: .*tp3"):
        tiered(["tp2"], ["tp3"])
