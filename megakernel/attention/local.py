"""Windowed softmax attention: FLuRKA's near part alone."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import HeadShard, Seed
from megakernel.attention.layer import AttentionLayer, Properties
from megakernel.attention.mixture import build_mixture, priors_and_shift, sharded_mixture
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.config.attention import Attention
from megakernel.ops import Tail, window_attention
from megakernel.ops.documents import Positions
from megakernel.ops.mixture import pack_keys


class LocalAttention(AttentionLayer):
    """Causal softmax over a token's own block, optionally with the block before."""

    def __init__(
        self,
        form: Attention,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        seed: Seed,
        heads: HeadShard,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, True, heads)
        assert form.near is not None
        assert form.near.block_size is not None
        self.block_size = form.near.block_size
        self.blocks = form.near.blocks
        self.near_window = (self.block_size, self.blocks)
        self.keys_per_head = form.keys_per_head
        self.mixture = build_mixture(form.mixture, self.kv_heads, head_dim, seed)

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        per_token = len(self.kv_heads) * (self.keys_per_head + 1) * self.head_dim
        state = per_token * self.block_size * self.blocks
        return Properties(True, recurrent=True, state_size=state, state_size_per_token=0, exchanges=("halo",))

    def sharded_parameters(self) -> dict[str, int]:
        """Shifts and priors of mixture keys."""
        return sharded_mixture(self.mixture)

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
        """See AttentionLayer."""
        priors, shift = priors_and_shift(self.mixture)
        if cp_shard.size > 1:
            state = halo(cp_shard, pack_keys(k), v, self.block_size * self.blocks)
        return window_attention(
            q,
            k,
            v,
            block_size=self.block_size,
            blocks=self.blocks,
            priors=priors,
            shift=shift,
            rotary=rotary,
            positions=positions,
            initial_state=state,
        )


def halo(cp_shard: ContextParallelShard, k: Tensor, v: Tensor, count: int) -> Tail:
    """The `count` tokens before a shard."""
    if count > k.shape[2]:
        raise ValueError(
            f"a shard of {k.shape[2]} tokens is shorter than the {count} tokens that its neighbour needs; "
            "use fewer shards or smaller blocks"
        )
    return Tail(cp_shard.previous_tokens(k, count), cp_shard.previous_tokens(v, count))
