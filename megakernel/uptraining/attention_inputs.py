"""What an attention layer was called with, so that another can be called with the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.attention import WHOLE, ContextParallelShard, Rotary


class AttentionInputs(NamedTuple):
    """The arguments of one `AttentionLayer.forward`: n tokens, one of P shards of rows of N = P n."""

    q: Tensor
    """(B, H, n, d), not rotated; H the heads of this tensor rank."""

    k: Tensor
    """(B, H_kv, n, d), not rotated."""

    v: Tensor
    """(B, H_kv, n, D)"""

    padding_mask: Tensor | None = None
    """(B, n) bool, True for real tokens; None: all are."""

    positions: Tensor | None = None
    """(B, n) place of each token in its document; None: every row is one document."""

    rotary: Rotary | None = None
    cp_shard: ContextParallelShard = WHOLE

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "AttentionInputs":
        """From what a forward hook of the layer is told; autograd sees constants."""
        inputs = cls(*args, **kwargs)
        return inputs._replace(q=inputs.q.detach(), k=inputs.k.detach(), v=inputs.v.detach())

    def run(self, core: Callable[..., Tensor], values: Tensor | None = None) -> Tensor:
        """What the layer `core` makes of it, (B, H, n, D); with `values` (B, H_kv, n, any width) in place of v."""
        return core(
            self.q,
            self.k,
            self.v if values is None else values,
            self.padding_mask,
            positions=self.positions,
            rotary=self.rotary,
            cp_shard=self.cp_shard,
        )

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
        if self.positions is not None:
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
