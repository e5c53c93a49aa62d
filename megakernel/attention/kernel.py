"""Kernel attention: phi(q).phi(k) with a running sum as state."""

from typing import Any, cast

from torch import Tensor

from megakernel.attention.features import build_projection
from megakernel.attention.heads import HeadShard, Seed
from megakernel.attention.layer import AttentionLayer, Properties, rotate
from megakernel.attention.mixture import build_mixture, keys_and_priors, sharded_mixture
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.config.attention import Attention
from megakernel.ops import kernel_attention
from megakernel.ops.documents import Positions


class KernelAttention(AttentionLayer):
    """phi(q)^T sum phi(k) v^T over phi(q)^T sum phi(k) (docs/formulas.md, 2).

    Shards of a sequence exchange the states of what lies before each, and behind it where tokens see both ways.
    """

    def __init__(
        self,
        form: Attention,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        seed: Seed,
        heads: HeadShard,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, causal, heads)
        assert form.feature_map is not None
        self.projection = build_projection(form.feature_map, self.kv_heads, head_dim, seed, heads)
        self.keys_per_head = form.keys_per_head
        self.mixture = build_mixture(form.mixture, self.kv_heads, head_dim, seed)

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        state = len(self.kv_heads) * self.projection.features * (self.head_dim + 1)
        return Properties(
            self.causal,
            recurrent=self.causal,
            state_size=state,
            state_size_per_token=0,
            exchanges=("state",),
        )

    def sharded_parameters(self) -> dict[str, int]:
        """The projection, and shifts and priors of mixture keys."""
        cut = {f"projection.{name}": at for name, at in self.projection.sharded_parameters().items()}
        return cut | sharded_mixture(self.mixture)

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
        dtype = v.dtype
        k, priors = keys_and_priors(self.mixture, k)
        q, v = q.to(k.dtype), v.to(k.dtype)
        q, k = rotate(rotary, q, k, positions)
        out, state = kernel_attention(
            q,
            k,
            v,
            feature_map=self.projection.feature_map,
            projection=self.projection(),
            priors=priors,
            causal=self.causal,
            mass=None if key_mask is None else key_mask[:, None].to(v.dtype),
            positions=positions,
            initial_state=state,
            return_state=True,
            exchange=cp_shard.start_prefix if cp_shard.size > 1 else None,
            exchange_after=cp_shard.start_suffix if cp_shard.size > 1 and not self.causal else None,
        )
        return cast(Tensor, out).to(dtype), state
