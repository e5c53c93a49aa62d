"""Two tiers of tests: the first for every change, the second for what lands.

A test is of the first tier unless it, its module or its case is marked `second`. `pytest -m "not second"` runs the
first tier, plain `pytest` both. Of a test marked `covering(n)`, the first tier holds as few cases as show every
choice of values for every `n` of its parameters; the others are of the second.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def tiered(cases: Iterable[Any], first: Iterable[Any]) -> list[Any]:
    """`cases` for `pytest.mark.parametrize`, of which those that are not in `first` are of the second tier."""
    cases, first = list(cases), list(first)
    unknown = [case for case in first if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [case if case in first else _second(case) for case in cases]


def _second(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.second)


def mark_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark as `second` what `covering` leaves out."""
    matrices: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") and not item.get_closest_marker("second"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in matrices.values():
        (strength,) = cases[0].get_closest_marker("covering").args
        # Their text: not every value has a hash.
        values = [{name: repr(value) for name, value in case.callspec.params.items()} for case in cases]
        chosen = covering(values, strength)
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("second")


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> set[int]:
    """The places of cases that hold, for every `strength` of the parameters, all values that the cases give them.

    Each case is parameter -> value. Taken greedily, first the case that shows most; of those that show the same, the
    one whose values were taken least.
    """
    shows = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*shows)
    taken: Counter[tuple[str, Hashable]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda place: (len(shows[place] & missing), -sum(taken[x] for x in cases[place].items())),
        )
        chosen.add(best)
        missing -= shows[best]
        taken.update(cases[best].items())
    return chosen
