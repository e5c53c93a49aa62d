"""Named sets of measurements."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megakernel.config import UserError

from .cases import Case
from .implementations import ATTENTIONS, LAYERS, SELECTED
from .targets import DEFAULT, PAPER, Target


@dataclass(frozen=True)
class Suite:
    """Cases, the implementations to measure in them, and the baseline."""

    title: str

    description: str
    """A paragraph for the page on the sizes and their origin."""

    cases: tuple[Case, ...]

    implementations: tuple[str, ...]
    """Names in `implementations.IMPLEMENTATIONS`; of layers, these are presets."""

    baseline: str
    """Name of the implementation whose time the others are divided by."""

    device: str
    """Type of device that the suite is meant for."""

    targets: tuple[Target, ...] = ()

    doubles_tokens: bool = False
    """Cases differ only in N, which doubles from one to the next: the page shows the cost of a doubling."""

    def narrowed(self, min_tokens: int | None, max_tokens: int | None, only: Sequence[str]) -> "Suite":
        """The suite with cases of `min_tokens` <= B N <= `max_tokens` and the implementations in `only`, or all.

        None and an empty `only` exclude nothing. Raises UserError if no case is left or a name is unknown.
        """
        least, most = min_tokens or 0, float("inf") if max_tokens is None else max_tokens
        cases = tuple(case for case in self.cases if least <= case.all_tokens <= most)
        if not cases:
            sizes = [case.all_tokens for case in self.cases]
            if most < min(sizes):
                raise UserError(f"--max-tokens {max_tokens} leaves no case; set at least {min(sizes)}")
            raise UserError(f"--min-tokens {min_tokens} leaves no case; set at most {min(most, max(sizes))}")
        for name in only:
            if name not in self.implementations:
                known = ", ".join(self.implementations)
                raise UserError(f"--only {name!r} is no implementation of the suite; choose among {known}")
        implementations = tuple(name for name in self.implementations if not only or name in only)
        return replace(self, cases=cases, implementations=implementations)


SHORT_SEQUENCE = 4096
"""Tokens of a sequence in cases of many sequences."""


def _default_cases() -> tuple[Case, ...]:
    sizes = [(dim, tokens) for dim in (128, 64) for tokens in (2**14, 2**16, 2**18, 2**20)]
    return tuple(
        Case(tokens // length, length, heads=16, head_dim=dim)
        for dim, tokens in sizes
        for length in (tokens, SHORT_SEQUENCE)
    )


def _paper_cases() -> tuple[Case, ...]:
    figure_3 = [Case(1, tokens, 8, 325, rank=1500) for tokens in range(7_050, 55_501, 3_000)]
    ranks = (8_000, 11_200, 14_400, 17_600, 20_000)
    figure_4_top = [Case(1, 20_000, 4, 128, rank=rank) for rank in ranks]
    figure_4_bottom = [Case(1, 20_000, 4, width // 4, rank=1_000) for width in range(800, 20_001, 3_200)]
    appendix_c = [Case(1, tokens, 4, 128, rank=256) for tokens in range(7_500, 52_501, 9_000)]
    return (*figure_3, *figure_4_top, *figure_4_bottom, *appendix_c)


SUITES = {
    "default": Suite(
        "Causal attention on a GPU",
        "Causal attention in bfloat16, H = 16, as one long sequence and as several of 4,096 tokens. favor's phi is as "
        "wide as a head.",
        _default_cases(),
        tuple(name for name in ATTENTIONS if name != SELECTED),
        baseline="kernel elu",
        device="cuda",
        targets=DEFAULT,
    ),
    "paper": Suite(
        "FLuRKA at its paper's settings",
        "One bidirectional transformer layer (three projections, the mechanism, the output projection, and the MLP of "
        "512 of the paper's models; no norms and no biases), one sequence, bfloat16. Figure 3: d_m = 2600, "
        "d_k = 1500, H = 8, N from 7,050 to 55,500. Figure 4, top: N = 20,000, d_h = 128, d_k from 8,000 to 20,000; "
        "bottom: N = 20,000, d_k = 1,000, d_m from 800 to 20,000. Appendix C: N from 7,500 to 52,500. Where the paper "
        "gives no H it is 4, as in its section 4; where it gives neither d_m nor d_k (appendix C) they are 512 and "
        "256, inside the region of its claim 1. phi is as wide as a head.",
        _paper_cases(),
        tuple(LAYERS),
        baseline="flurka_rnn",
        device="cuda",
        targets=PAPER,
    ),
    "cpu": Suite(
        "Causal attention on a CPU",
        "Causal attention in float32, one sequence, H = 4, d = 64, chunked ops. favor's phi is as wide as a head. "
        "SDPA and the low-rank parent, a softmax over landmarks, weigh a number of pairs that grows with N squared.",
        tuple(Case(1, 2**exponent, heads=4, head_dim=64) for exponent in range(10, 16)),
        (
            "kernel elu",
            "kernel hedgehog",
            "kernel favor",
            "FLuRKA",
            "FLuRKA's low-rank parent",
            SELECTED,
            "SDPA",
        ),
        baseline="SDPA",
        device="cpu",
        doubles_tokens=True,
    ),
}
"""Name on the command line -> suite."""
