"""The project's speed targets, and whether a suite's times meet them.

All targets are for forward and backward together, on one H100 or H200.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from .cases import Case
from .clock import Times

TOKENS_16K, TOKENS_1M = 2**14, 2**20
"""Numbers of tokens in the targets."""


Figures = Mapping[tuple[str, Case], Times]
"""Times by implementation and case; those that did not run are missing."""


class Target(NamedTuple):
    """A bound on a figure in some cases of a suite."""

    description: str

    bound: float

    figure: Callable[[Figures, Case], float]
    """The bounded figure; raises KeyError if its times are missing."""

    applies: Callable[[Case], bool]

    is_upper_bound: bool = False
    """Whether `bound` is an upper bound."""

    def cells(self, figures: Figures, cases: Iterable[Case]) -> list[str]:
        """The table cells: target, bound, figure of the worst case, and whether it meets the bound."""
        figures_of_cases = []
        for case in filter(self.applies, cases):
            with suppress(KeyError):
                figures_of_cases.append(self.figure(figures, case))
        bound = f"at {'most' if self.is_upper_bound else 'least'} {self.bound:g}"
        if not figures_of_cases:
            return [self.description, bound, "—", "—"]
        worst = max(figures_of_cases) if self.is_upper_bound else min(figures_of_cases)
        met = worst <= self.bound if self.is_upper_bound else worst >= self.bound
        return [self.description, bound, f"{worst:.2f}", "yes" if met else "no"]


def _is_16k(case: Case) -> bool:
    return case.all_tokens == TOKENS_16K


def _is_1m(case: Case) -> bool:
    return case.batch == 1 and case.tokens == TOKENS_1M


def _figures_3_and_4(case: Case) -> bool:
    return case.rank is not None and case.rank >= 1_000


def _end_of_appendix_c(case: Case) -> bool:
    return case.tokens == 52_500 and not _figures_3_and_4(case)


def _speedup(ours: str, other: str, bound: float, where: str, applies: Callable[[Case], bool]) -> Target:
    """A target for the time of another implementation over that of ours."""
    return Target(
        f"time of {other} over that of {ours}, {where}",
        bound,
        lambda figures, case: figures[other, case].both / figures[ours, case].both,
        applies,
    )


DEFAULT = (
    _speedup("kernel elu", "fla chunk", 2, "16k tokens", _is_16k),
    _speedup("kernel elu", "fla fused_chunk", 2, "16k tokens", _is_16k),
    _speedup("kernel elu, not normalized", "fla chunk, not normalized", 1.5, "16k tokens", _is_16k),
    _speedup("kernel elu, not normalized", "fla fused_chunk, not normalized", 1.5, "16k tokens", _is_16k),
    _speedup("kernel elu", "fla chunk", 3, "one sequence of 1M tokens", _is_1m),
    Target(
        "peak memory of kernel elu over that of fla chunk, one sequence of 1M tokens",
        0.25,
        lambda figures, case: figures["kernel elu", case].peak.both / figures["fla chunk", case].peak.both,
        _is_1m,
        is_upper_bound=True,
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
                figures[ours, case].both / figures[ours, replace(case, tokens=TOKENS_16K)].both
            ),
            _is_1m,
            is_upper_bound=True,
        )
        for ours in ("kernel elu", "FLuRKA")
    ),
)
"""Targets for causal attention."""

PAPER = (
    _speedup("flurka_rnn", "linear", 1.7, "figures 3 and 4", _figures_3_and_4),
    _speedup("flurka_performer", "performer", 1.7, "figures 3 and 4", _figures_3_and_4),
    _speedup("flurka_rnn", "linformer", 3.3, "figures 3 and 4", _figures_3_and_4),
    _speedup("flurka_performer", "linformer", 3.3, "figures 3 and 4", _figures_3_and_4),
    _speedup("flurka_rnn", "softmax", 23, "52,500 tokens of appendix C", _end_of_appendix_c),
    _speedup("flurka_performer", "softmax", 23, "52,500 tokens of appendix C", _end_of_appendix_c),
)
"""Targets for the FLuRKA paper's layers; kernel parents are linear and performer, the low-rank parent is linformer."""
