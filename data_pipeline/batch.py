"""The batch that one forward pass reads."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

PADDING = -1
"""Position of padding."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or one rank's shard of it along the sequence."""

    tokens: Tensor
    """(B, N) int64."""

    labels: Tensor
    """Targets, int64 (float32 for a regression), per token (B, N) or per example (E,).

    A causal model's label is the next token; the last one lies beyond this shard's edge. An encoder-decoder's rows are
    E sources and E targets in turn, and its labels are those of the targets (E, N).
    """

    loss_mask: Tensor
    """bool, shaped as `labels`: which labels count in the loss."""

    positions: Tensor
    """(B, N) int64: position in the token's document, or in the sample if documents are not isolated.

    PADDING marks padding, which may lie anywhere; positions count past it.
    """

    @property
    def label_positions(self) -> Tensor:
        """Positions of the tokens that labels are of: of all tokens, or of the targets behind each source."""
        return self.positions if len(self.positions) == len(self.labels) else self.positions[1::2]

    @property
    def cu_seqlens(self) -> Tensor:
        """Offsets of document starts in the flattened B·N tokens, then B·N itself; int32, ascending.

        A document starts at a token of position 0. A shard that continues a document of an earlier shard has no
        start at its first token, so the first entry need not be 0. Synchronizes with the device.
        """
        starts = (self.positions.flatten() == 0).nonzero().flatten()
        end = starts.new_tensor([self.positions.numel()])
        return torch.cat([starts, end]).to(torch.int32)

    def with_counted(self, samples: Tensor) -> "Batch":
        """The batch with only the labels of these samples counted; samples: (B,) or (E,) bool."""
        per_label = samples.reshape(-1, *(1,) * (self.loss_mask.dim() - 1))
        return replace(self, loss_mask=self.loss_mask & per_label)

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on `device`; a copy from pinned memory is asynchronous."""
        return Batch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory; torch's DataLoader calls this."""
        return Batch(*(getattr(self, f.name).pin_memory() for f in fields(self)))
