"""What one forward pass reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or one rank's piece of it along the sequence."""

    tokens: Tensor
    """(B, N) int64."""

    labels: Tensor
    """(B, N) int64: the next token; the last one lies beyond this piece's edge."""

    loss_mask: Tensor
    """(B, N) bool: which labels count."""

    positions: Tensor
    """(B, N) int64: position within the token's own document (within the sample where documents are not isolated)."""
