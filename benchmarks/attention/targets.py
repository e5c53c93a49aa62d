"""The speeds that this project sets out to reach, and what times of a suite say of them.

All are of forward and backward together, on one H100 or H200.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from .cases import Case
from .clock import Times

FEW, MANY = 2**14, 2**20
"""Tokens that the targets name."""


Figures = Mapping[tuple[str, Case], Times]
"""By implementation and case; one that did not run is not there."""


class Target(NamedTuple):
    """A bound that holds in some cases of a suite."""

    about: str

    bound: float

    figure: Callable[[Figures, Case], float]
    """The bounded figure; KeyError where it is not known."""

    applies: Callable[[Case], bool]

    at_most: bool = False
    """The bound is from above."""

    def cells(self, figures: Figures, cases: Iterable[Case]) -> list[str]:
        """The target, its bound, the figure of the worst case, and whether that one keeps the bound."""
        known = []
        for case in filter(self.applies, cases):
            with suppress(KeyError):
                known.append(self.figure(figures, case))
        bound = f"at {'most' if self.at_most else 'least'} {self.bound:g}"
        if not known:
            return [self.about, bound, "—", "—"]
        worst = max(known) if self.at_most else min(known)
        kept = worst <= self.bound if self.at_most else worst >= self.bound
        return [self.about, bound, f"{worst:.2f}", "yes" if kept else "no"]


def _short(case: Case) -> bool:
    return case.all_tokens == FEW


def _longest_row(case: Case) -> bool:
    return case.batch == 1 and case.tokens == MANY


def _figures_3_and_4(case: Case) -> bool:
    return case.rank is not None and case.rank >= 1_000


def _end_of_appendix_c(case: Case) -> bool:
    return case.tokens == 52_500 and not _figures_3_and_4(case)


def _as_fast(ours: str, other: str, bound: float, where: str, applies: Callable[[Case], bool]) -> Target:
    """Time of another over ours."""
    return Target(
        f"time of {other} over that of {ours}, {where}",
        bound,
        lambda figures, case: figures[other, case].both / figures[ours, case].both,
        applies,
    )


DEFAULT = (
    _as_fast("kernel elu", "fla chunk", 2, "16k tokens", _short),
    _as_fast("kernel elu", "fla fused_chunk", 2, "16k tokens", _short),
    _as_fast("kernel elu, not normalized", "fla chunk, not normalized", 1.5, "16k tokens", _short),
    _as_fast("kernel elu, not normalized", "fla fused_chunk, not normalized", 1.5, "16k tokens", _short),
    _as_fast("kernel elu", "fla chunk", 3, "one sequence of 1M tokens", _longest_row),
    _as_fast("gated delta rule", "fla gated delta rule", 1, "16k tokens", _short),
    Target(
        "peak memory of kernel elu over that of fla chunk, one sequence of 1M tokens",
        0.25,
        lambda figures, case: figures["kernel elu", case].peak.both / figures["fla chunk", case].peak.both,
        _longest_row,
        at_most=True,
    ),
    *(
        Target(
            f"share of the floor that {ours} reaches, all cases",
            0.5,
            lambda figures, case, ours=ours: figures[ours, case].both_share,
            lambda case: True,
        )
        for ours in ("kernel elu", "kernel hedgehog", "kernel favor", "FLuRKA")
    ),
    *(
        Target(
            f"time of {ours} at 1M tokens over that at 16k",
            70,
            lambda figures, case, ours=ours: (
                figures[ours, case].both / figures[ours, replace(case, tokens=FEW)].both
            ),
            _longest_row,
            at_most=True,
        )
        for ours in ("kernel elu", "FLuRKA")
    ),
)
"""Targets of causal attention."""

PAPER = (
    _as_fast("flurka_rnn", "linear", 1.7, "figures 3 and 4", _figures_3_and_4),
    _as_fast("flurka_performer", "performer", 1.7, "figures 3 and 4", _figures_3_and_4),
    _as_fast("flurka_rnn", "linformer", 3.3, "figures 3 and 4", _figures_3_and_4),
    _as_fast("flurka_performer", "linformer", 3.3, "figures 3 and 4", _figures_3_and_4),
    _as_fast("flurka_rnn", "softmax", 23, "52,500 tokens of appendix C", _end_of_appendix_c),
    _as_fast("flurka_performer", "softmax", 23, "52,500 tokens of appendix C", _end_of_appendix_c),
)
"""Targets of the FLuRKA paper's layers; kernel parents are linear and performer, the low-rank parent is linformer."""
