"""What an attention layer was called with, so that another can be called with the same."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel import attention
from megakernel.attention.inputs import WHOLE_ROWS


@dataclass(frozen=True, kw_only=True)
class AttentionInputs(attention.AttentionInputs):
    """All that an `AttentionLayer` is called with: n tokens, one of P shards of rows of N = P n."""

    q: Tensor
    """(B, H, n, d), not rotated; H the heads of this tensor rank."""

    k: Tensor
    """(B, H_kv, n, d), not rotated."""

    v: Tensor
    """(B, H_kv, n, D)"""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, inputs: attention.AttentionInputs = WHOLE_ROWS
    ) -> "AttentionInputs":
        """From what a layer was called with; autograd sees constants."""
        return cls(q=q.detach(), k=k.detach(), v=v.detach(), **vars(inputs))

    def run(self, core: Callable[..., Tensor], values: Tensor | None = None) -> Tensor:
        """What the layer `core` makes of it, (B, H, n, D); with `values` (B, H_kv, n, any width) in place of v."""
        return core(self.q, self.k, self.v if values is None else values, self)

    def turned(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of these tokens, rotated at their `places`."""
        return replace(self, positions=self.places()).rotated(q, k)

    @property
    def length(self) -> int:
        """N, tokens of a whole row."""
        return self.q.shape[2] * self.cp_shard.size

    @property
    def first(self) -> int:
        """Place in the row of the first of these tokens."""
        return self.q.shape[2] * self.cp_shard.rank

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    def places(self) -> Tensor:
        """(B, n) int64: where each real token stands in its document, what rotates it."""
        if isinstance(self.positions, Tensor):
            return self.positions.clamp(min=0)
        if self.padding_mask is not None:
            return (self.padding_mask.long().cumsum(1) - 1).clamp(min=0)
        own = torch.arange(self.first, self.first + self.q.shape[2], device=self.q.device)
        return own.expand(len(self.q), -1)

    def real(self) -> Tensor:
        """(B, N) bool, which tokens of whole rows are no padding."""
        if self.padding_mask is not None:  # never with a row in shards
            return self.padding_mask.bool()
        return torch.ones(len(self.q), self.length, dtype=torch.bool, device=self.q.device)
