"""Softmax attention, the quadratic baseline."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import HeadShard
from megakernel.attention.layer import AttentionLayer, Properties, rotate
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.attention.ulysses import Ulysses
from megakernel.config.parallel import SoftmaxExchange
from megakernel.ops import softmax_attention
from megakernel.ops.documents import Positions
from megakernel.ops.softmax_attention.ring import ring_attention


class SoftmaxAttention(AttentionLayer):
    """softmax(q k^T / sqrt(d)) v, over all tokens in sight: of the document, or the last `window` of them.

    Shards of a sequence trade tokens for heads where they have as many heads each, so that each sees whole rows of its
    own, all with the same work. Otherwise, or where `exchange` says so, keys and values go round (`ring_attention`).
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool,
        window: int | None,
        exchange: SoftmaxExchange,
        heads: HeadShard,
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, causal, heads)
        self.window = window
        self.exchange = exchange

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        per_token = 2 * len(self.kv_heads) * self.head_dim
        grows = self.window is None
        return Properties(
            self.causal,
            recurrent=not grows,
            state_size=0 if self.window is None else per_token * (self.window - 1),
            state_size_per_token=per_token if grows else 0,
            exchanges=("heads or ring",),
        )

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
        q, k = rotate(rotary, q, k, positions)
        if self._goes_round(cp_shard):
            real = None if self.causal else key_mask
            form: dict[str, Any] = {"causal": self.causal, "window": self.window, "positions": positions}
            return ring_attention(q, k, v, ring=cp_shard, key_mask=real, **form), None
        rows = Ulysses(cp_shard, q.shape[1], k.shape[1])
        out, state = softmax_attention(
            rows.of_queries(q),
            *rows.of_keys(k, v),
            causal=self.causal,
            window=self.window,
            positions=rows.of_positions(positions, q.shape[2]),
            key_mask=None if self.causal else key_mask,
            initial_state=state,
        )
        return rows.cut(out), state

    def _goes_round(self, cp_shard: ContextParallelShard) -> bool:
        divide = len(self.query_heads) % cp_shard.size == 0
        return cp_shard.size > 1 and (self.exchange == "ring" or (self.exchange == "auto" and not divide))
