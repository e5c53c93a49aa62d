"""What one forward pass reads."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PADDING = -1
"""Position of what only fills a sequence."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or one rank's shard of it along the sequence."""

    tokens: Tensor
    """(B, N) int64."""

    labels: Tensor
    """int64 (float32 for a regression): what is to be predicted, for each token (B, N) or for each example (E,).

    A causal model's is the next token, of which the last lies beyond this shard's edge.
    """

    loss_mask: Tensor
    """bool, as `labels`: which of them count."""

    positions: Tensor
    """(B, N) int64: place in the token's own document, or in the sample where documents are not isolated.

    PADDING marks what is no token; padding lies anywhere and positions count past it.
    """

    @property
    def cu_seqlens(self) -> Tensor:
        """Where documents start in the flattened B·N tokens, then B·N itself; int32, ascending.

        A start is a token of position 0. A sequence that continues a document begun on an earlier shard has none
        at its first token, so with sequence sharding the first entry need not be 0. Waits for the device.
        """
        starts = (self.positions.flatten() == 0).nonzero().flatten()
        end = starts.new_tensor([self.positions.numel()])
        return torch.cat([starts, end]).to(torch.int32)

    def counting(self, samples: Tensor) -> "Batch":
        """The same batch where only the labels of these samples count; samples: (B,) bool, or (E,)."""
        per_label = samples.reshape(-1, *(1,) * (self.loss_mask.dim() - 1))
        return replace(self, loss_mask=self.loss_mask & per_label)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; from pinned memory the copy runs while the device computes."""
        return Batch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory (what torch's DataLoader calls)."""
        return Batch(*(getattr(self, f.name).pin_memory() for f in fields(self)))
