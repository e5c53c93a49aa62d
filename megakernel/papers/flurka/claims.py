"""FLuRKA's claims 1 to 3 at the run's heads and widths: where it needs fewer operations than its two parents.

`claims` is a map of them (appendix B). The equations count a multiply-add as one operation, and one for each number
that a kernel or a softmax is applied to; torch counts a multiply-add as two and the rest not at all. They assume that
phi keeps the width of a head, omit the normalizer, and compress the input in both Linformer and FLuRKA.

The paper's differences of its equations have two errors. Eq. 9 prints d_k d_m d_k for d_k d_m d_h, which is harmless.
Eq. 10 prints 2 N d_m d_h for N d_m d_h: it omits that FLuRKA reads its state, too. Its bound N > d_k (H + 2) is
therefore too low where d_m hardly exceeds d_k, and claims 1 and 3 fail in a small part of their regions, such as
N=3000, d_k=250, d_m=256, H=8. The correct derivation gives N > d_k (2 H + 1), which is sufficient everywhere.
"""

from dataclasses import dataclass

from megakernel.analysis.plots.subject import Subject
from megakernel.analysis.plots.table import Row


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one attention layer on one sequence."""

    tokens: int
    """N"""

    rank: int
    """Compressed keys, d_k."""

    width: int
    """Width of the input, d_m."""

    heads: int
    """H"""

    @property
    def head_dim(self) -> float:
        """d_h = d_m / H."""
        return self.width / self.heads


def low_rank_operations(sizes: LayerSizes) -> dict[str, float]:
    """Eq. 6: Linformer by part."""
    n, rank, width = sizes.tokens, sizes.rank, sizes.width
    return {
        "compression": 2 * n * rank * width,
        "projections": n * width**2 + 2 * rank * width**2,
        "scores": n * width * rank,
        "softmax": n * sizes.heads * rank,
        "values": n * rank * width,
    }


def kernel_operations(sizes: LayerSizes) -> dict[str, float]:
    """Eq. 7: kernel attention by part."""
    n, width = sizes.tokens, sizes.width
    return {
        "projections": 3 * n * width**2,
        "feature_map": 2 * n * width,
        "state": n * width * sizes.head_dim,
        "readout": n * width * sizes.head_dim,
    }


def flurka_operations(sizes: LayerSizes) -> dict[str, float]:
    """Eq. 8: FLuRKA by part."""
    n, rank, width = sizes.tokens, sizes.rank, sizes.width
    return {
        "compression": 2 * n * rank * width,
        "projections": n * width**2 + 2 * rank * width**2,
        "feature_map": n * width + rank * width,
        "state": rank * width * sizes.head_dim,
        "readout": n * width * sizes.head_dim,
    }


def in_region_of_claim_1(sizes: LayerSizes) -> bool:
    """N > d_k (H + 2) > d_m > d_k > d_h: FLuRKA needs fewer operations than both parents."""
    bound = sizes.rank * (sizes.heads + 2)
    return sizes.tokens > bound > sizes.width > sizes.rank > sizes.head_dim


def in_region_of_claim_2(sizes: LayerSizes) -> bool:
    """N - 1 > d_k > d_h: fewer than the low-rank parent."""
    return sizes.tokens - 1 > sizes.rank > sizes.head_dim


def is_long_enough(sizes: LayerSizes) -> bool:
    """N > d_k (2 H + 1): the bound of claims 1 and 3 from the correct difference of eqs. 7 and 8."""
    return sizes.tokens > sizes.rank * (2 * sizes.heads + 1)


def speedups(sizes: LayerSizes) -> tuple[float, float]:
    """Operations of the low-rank and of the kernel parent over FLuRKA's."""
    low_rank, kernel, flurka = (
        sum(count(sizes).values()) for count in (low_rank_operations, kernel_operations, flurka_operations)
    )
    return low_rank / flurka, kernel / flurka


CLAIM_TOKENS = tuple(2**n for n in range(9, 21))


def measure_claims(subject: Subject) -> list[Row]:
    """tokens N, rank d_k; over_low_rank, over_kernel: speedups by eqs. 6 to 8; claim_1, claim_2: 1 in their regions.

    long_enough: 1 where the correct bound holds (`is_long_enough`).
    """
    width, heads = subject.config.model.hidden_size, subject.config.model.num_heads
    ranks = [2**n for n in range(4, max(width, 32).bit_length() + 1)]
    rows: list[Row] = []
    for tokens in CLAIM_TOKENS:
        for rank in ranks:
            if rank >= tokens:
                continue
            sizes = LayerSizes(tokens, rank, width, heads)
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
