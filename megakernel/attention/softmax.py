"""Softmax attention, the quadratic baseline."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.sequence import ContextParallelShard
from megakernel.attention.ulysses import Ulysses
from megakernel.config.attention import Attention
from megakernel.ops import softmax_attention
from megakernel.ops.softmax_attention.ring import ring_attention


class SoftmaxAttention(AttentionLayer):
    """softmax(q k^T / sqrt(d)) v, over all tokens in sight: of the document, or the last `window` of them.

    Shards of a sequence trade tokens for heads where they have as many heads each, so that each sees whole rows of its
    own, all with the same work. Otherwise, or where `exchange` says so, keys and values go round (`ring_attention`).
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        self.window, self.exchange = form.window, settings.softmax_exchange

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        shard, real = inputs.cp_shard, None if self.causal else inputs.padding_mask
        if self._goes_round(shard):
            form: dict[str, Any] = {"causal": self.causal, "window": self.window, "positions": inputs.at}
            return ring_attention(q, k, v, ring=shard, key_mask=real, **form), None
        rows = Ulysses(shard, q.shape[1], k.shape[1])
        out, state = softmax_attention(
            rows.of_queries(q),
            *rows.of_keys(k, v),
            causal=self.causal,
            window=self.window,
            positions=rows.of_positions(inputs.at, q.shape[2]),
            key_mask=real,
            initial_state=inputs.state,
        )
        return rows.cut(out), state

    def _goes_round(self, cp_shard: ContextParallelShard) -> bool:
        divide = len(self.query_heads) % cp_shard.size == 0
        return cp_shard.size > 1 and (self.exchange == "ring" or (self.exchange == "auto" and not divide))
