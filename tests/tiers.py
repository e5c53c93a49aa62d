"""Two tiers of tests: the first runs for every change, both before a change lands.

A test is in the first tier unless it, its module or its case is marked `second`. `pytest -m "not second"` runs the
first tier, plain `pytest` both. Of a test marked `covering(n)`, the first tier has few cases that together cover all
combinations of values of every `n` parameters; its other cases are in the second tier. Marked `covering(n, m)`, both
tiers together have no more than the cases that cover every `m` parameters; MEGAKERNEL_TEST_GRID=full keeps them all.
"""

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def tiered(cases: Iterable[Any], first: Iterable[Any]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`; those that are not in `first` are in the second tier."""
    cases, first = list(cases), list(first)
    unknown = [case for case in first if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in first else _second(case) for case in cases]


def _second(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.second)


def mark_tiers(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Mark as `second` the cases that `covering` does not choose; returns those that are in neither tier."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for cases in matrices.values():
        strength, *of_both = cases[0].get_closest_marker("covering").args
        if of_both and os.environ.get("MEGAKERNEL_TEST_GRID") != "full":
            kept = covering(list(map(_values, cases)), *of_both)
            left_out += [case for number, case in enumerate(cases) if number not in kept]
            cases = [cases[number] for number in sorted(kept)]
        cases = [case for case in cases if not case.get_closest_marker("second")]
        chosen = covering(list(map(_values, cases)), strength)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("second")
    return left_out


def _values(case: pytest.Item) -> dict[str, str]:
    # By their repr, as not every value is hashable.
    return {name: repr(value) for name, value in case.callspec.params.items()}


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> set[int]:
    """Indices of few cases that cover, for every `strength` parameters, all combinations of values in `cases`.

    Each case is parameter -> value. Greedy: takes the case that covers most new combinations, and among equals the one
    whose values were taken least often.
    """
    combos = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*combos)
    taken: Counter[tuple[str, Hashable]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda index: (len(combos[index] & missing), -sum(taken[x] for x in cases[index].items())),
        )
        chosen.add(best)
        missing -= combos[best]
        taken.update(cases[best].items())
    return chosen
