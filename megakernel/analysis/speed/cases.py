"""What is measured: sizes of one attention, or of one transformer layer around it."""

from dataclasses import dataclass

FFN_WIDTH = 512
"""Inner width of the MLP in the FLuRKA paper's models (its section 4)."""


@dataclass(frozen=True)
class Case:
    """Sizes of one measurement."""

    batch: int
    """B, rows"""

    tokens: int
    """N, tokens of a row"""

    heads: int
    """H, of queries, keys and values alike"""

    head_dim: int
    """d, of queries, keys and values alike"""

    rank: int | None = None
    """d_k, landmarks of a row; given where a whole transformer layer that sees both ways is measured (`is_layer`)."""

    @property
    def is_layer(self) -> bool:
        """A layer on inputs (N, B, H d) with its projections and MLP; otherwise causal attention on q, k, v."""
        return self.rank is not None

    @property
    def width(self) -> int:
        """d_m, width of a layer's input."""
        return self.heads * self.head_dim

    @property
    def all_tokens(self) -> int:
        """B N"""
        return self.batch * self.tokens

    def __str__(self) -> str:
        sizes = f"B={self.batch} N={self.tokens:,} H={self.heads} d={self.head_dim}"
        return f"{sizes} d_m={self.width:,} d_k={self.rank:,}" if self.rank is not None else sizes
