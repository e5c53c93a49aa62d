"""What all attention layers have in common: padding, positions, and sequences that come in parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from megakernel.attention.heads import ALL_HEADS, HeadShard
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import WHOLE, ContextParallelShard
from megakernel.ops.arguments import check_not_empty
from megakernel.ops.documents import Positions, position_rows


@dataclass(frozen=True)
class Properties:
    """What a mechanism can do."""

    causal: bool
    """Whether this layer is causal."""

    recurrent: bool
    """Whether a sequence continues from a state of constant size."""

    state_size: int
    """Numbers one sequence carries from token to token, whatever its length."""

    state_size_per_token: int
    """Numbers that each token adds to it."""

    exchanges: tuple[Literal["state", "halo", "heads", "heads or ring", "landmarks"], ...]
    """What shards of a sequence exchange."""


class SequenceState(NamedTuple):
    """Where a sequence stands after the tokens seen so far."""

    inner: Any
    """The state of the op."""

    position: Positions
    """Position of the next token: one for all rows, or (B,)."""


class AttentionLayer(nn.Module, ABC):
    """Attention over (B, H, N, d) with the heads of one shard.

    Parameters and buffers that belong to heads are named by `sharded_parameters`; what heads share is replicated.
    """

    keys_per_head = 1
    """Keys at one position that the layer wants from the projection for each key head."""

    compresses_input = False
    """Whether k and v come as projections of what `compress` made of the layer's input, one for each landmark."""

    near_window: tuple[int, int] | None = None
    """(b, blocks) of a layer that attends a token's own block of b tokens exactly, and the blocks - 1 before it."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool, heads: HeadShard = ALL_HEADS
    ):
        super().__init__()
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")
        self.heads = heads
        self.query_heads = heads.of(num_heads, "num_heads")
        self.kv_heads = heads.of(num_kv_heads, "num_kv_heads")
        self.head_dim = head_dim
        self.causal = causal

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """What this layer can do."""

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads, of parameters and buffers that are cut over shards of heads."""
        return {}

    def finish_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """Learn what a layer learns without gradients; called after every optimizer step.

        total: the sum of a tensor over all processes that saw other tokens of the batch with the same heads.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Positions,
        rotary: Rotary | None,
        cp_shard: ContextParallelShard,
        key_mask: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """Output and the state behind the last token.

        key_mask: (B, N) bool, which tokens are real; None where all are. Real tokens lie first, so that no real token
        of a causal layer can see the others.
        """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding_mask: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        rotary: Rotary | None = None,
        cp_shard: ContextParallelShard = WHOLE,
    ) -> Tensor:
        """Attention of whole rows, or of one shard of each.

        Args:
            q: (B, H, N, d), H the heads of this shard.
            k: (B, H_kv, N, d), or (B, H_kv, M, N, d) for a layer that wants M = keys_per_head keys at a position.
            v: (B, H_kv, N, D); k and v of L landmarks for a layer that `compresses_input`.
            padding_mask: (B, N) bool, True for real tokens; padding may lie anywhere and gets 0.
            positions: (B, N) position of each token within its own document, counting real tokens; None:
                every row is one document.
            rotary: rotates queries and keys where the mechanism wants it; q and k come unrotated.
            shard: which shard of the sequence these tokens are.

        Returns:
            (B, H, N, D) in the dtype of v.

        Raises:
            ValueError: shapes that do not fit; no token; padding on a shard of a sequence.
        """
        check_not_empty(q)
        if padding_mask is None:
            start: Positions = cp_shard.rank * q.shape[2] if positions is None else positions
            return self.attend(
                q, k, v, positions=start, rotary=rotary, cp_shard=cp_shard, key_mask=None, state=None
            )[0]
        expected = (q.shape[0], q.shape[2])
        if tuple(padding_mask.shape) != expected:
            raise ValueError(f"padding_mask has shape {tuple(padding_mask.shape)}; expected {expected}")
        if cp_shard.size > 1:
            raise ValueError(
                "padding_mask with a sequence in shards: pad nothing, or keep the sequence whole"
            )
        # Real tokens move to the front of their row, in order: blocks and windows then know nothing of padding.
        mask = padding_mask.bool()
        order = mask.int().argsort(dim=1, descending=True, stable=True)
        q = _reorder(q, order)
        if not self.compresses_input:
            k, v = _reorder(k, order), _reorder(v, order)
        mask_front = mask.gather(1, order)
        front = 0 if positions is None else positions.gather(1, order).masked_fill(~mask_front, 0)
        out, _ = self.attend(
            q, k, v, positions=front, rotary=rotary, cp_shard=cp_shard, key_mask=mask_front, state=None
        )
        return _reorder(out, order.argsort(dim=1)) * mask[:, None, :, None].to(out.dtype)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: SequenceState | None = None,
        *,
        positions: Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> tuple[Tensor, SequenceState]:
        """Continue sequences by N >= 1 tokens: a prompt at once, then token by token.

        Shapes as in `forward`; state: what an earlier call returned, None at the start; positions: None
        continues. Returns the output (B, H, N, D) and the state behind the last token. Causal layers only.
        """
        if not self.causal:
            raise ValueError("extend needs a causal layer; build it with causal=True")
        check_not_empty(q)
        start: Positions = 0
        if positions is not None:
            start = positions
        elif state is not None:
            start = state.position
            if isinstance(start, Tensor):
                start = start[:, None] + torch.arange(q.shape[2], device=q.device)
        out, inner = self.attend(
            q,
            k,
            v,
            positions=start,
            rotary=rotary,
            cp_shard=WHOLE,
            key_mask=None,
            state=None if state is None else state.inner,
        )
        following = start + q.shape[2] if isinstance(start, int) else start[:, -1] + 1
        return out, SequenceState(inner, following)


def finish_step(model: nn.Module, total: Callable[[Tensor], Tensor]) -> None:
    """Tell all layers that an optimizer step ended; see `AttentionLayer.finish_step`."""
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.finish_step(total)


def rotate(rotary: Rotary | None, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """q and k at their positions; k as (B, H_kv, N, d) or (B, H_kv, M, N, d)."""
    if rotary is None:
        return q, k
    rows = position_rows(positions, q.shape[2], q.device)
    q, turned = rotary.both(q, k.flatten(1, -3), rows)
    return q, turned.view_as(k)


def _reorder(x: Tensor, order: Tensor) -> Tensor:
    """Tokens (dimension -2) of x in the order (B, N)."""
    return x.gather(-2, order.view(len(x), *[1] * (x.dim() - 3), -1, 1).expand_as(x))
