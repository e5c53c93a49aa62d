"""Where FLuRKA needs fewer operations than its parents, at the run's width and heads (FLuRKA, claims 1 to 3)."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from megakernel.analysis.claims import (
    Sizes,
    in_region_of_claim_1,
    in_region_of_claim_2,
    is_long_enough,
    speedups,
)

from .drawing import cells
from .subject import Subject
from .table import Row

TOKENS = tuple(2**n for n in range(9, 21))


def measure(subject: Subject) -> list[Row]:
    """See `claim_map`."""
    model = subject.config.model
    return claim_map(model.hidden_size, model.num_heads)


def draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    """Maps over tokens and compressed keys: operations of a parent over FLuRKA's, and where claim 1 promises both."""
    return {name: cells(rows, "tokens", "rank", name) for name in ("over_low_rank", "over_kernel", "claim_1")}


def claim_map(width: int, heads: int) -> list[Row]:
    """tokens N, rank d_k; over_low_rank, over_kernel: speedups by eqs. 6 to 8; claim_1, claim_2: 1 in their regions.

    long_enough: 1 where the kernel is beaten by the derivation without the paper's slip.
    """
    ranks = [2**n for n in range(4, max(width, 32).bit_length() + 1)]
    rows: list[Row] = []
    for tokens in TOKENS:
        for rank in ranks:
            if rank >= tokens:
                continue
            sizes = Sizes(tokens, rank, width, heads)
            over_low_rank, over_kernel = speedups(sizes)
            rows.append(
                {
                    "tokens": tokens,
                    "rank": rank,
                    "over_low_rank": over_low_rank,
                    "over_kernel": over_kernel,
                    "claim_1": int(in_region_of_claim_1(sizes)),
                    "claim_2": int(in_region_of_claim_2(sizes)),
                    "long_enough": int(is_long_enough(sizes)),
                }
            )
    return rows
