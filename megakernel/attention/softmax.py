"""Softmax attention: over all tokens in sight, the quadratic baseline, or over a window, FLuRKA's near part alone."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.mixture import build_mixture, priors_and_shift
from megakernel.attention.sequence import ContextParallelShard, Ulysses
from megakernel.config.attention import Attention
from megakernel.ops import softmax_attention, window_attention
from megakernel.ops.mixture import pack_keys
from megakernel.ops.softmax_attention.ring import ring_attention


class SoftmaxAttention(AttentionLayer):
    """softmax(q k^T / sqrt(d)) v, over all tokens in sight: of the document, or the last `window` of them.

    With a cap the exponents are c tanh(q k^T / (c sqrt(d))).

    Shards of a sequence trade tokens for heads where they have as many heads each, so that each sees whole sequences
    of its own, all with the same work. Otherwise, or where `exchange` says so, keys and values go round
    (`ring_attention`).
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        self.window, self.softcap = form.window, form.softcap
        self.exchange = settings.softmax_exchange

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        shard, real = inputs.cp_shard, None if self.causal else inputs.padding_mask
        if self._goes_round(shard):
            form: dict[str, Any] = {"causal": self.causal, "window": self.window, "positions": inputs.at}
            return ring_attention(q, k, v, ring=shard, key_mask=real, **form), None
        ulysses = Ulysses(shard, q.shape[1], k.shape[1])
        out, state = softmax_attention(
            ulysses.of_queries(q),
            *ulysses.of_keys(k, v),
            causal=self.causal,
            window=self.window,
            softcap=self.softcap,
            positions=ulysses.of_positions(inputs.at, q.shape[2]),
            key_mask=real,
            initial_state=inputs.state,
        )
        return ulysses.cut(out), state

    def _goes_round(self, cp_shard: ContextParallelShard) -> bool:
        if self.softcap is not None:
            return False
        divide = len(self.query_heads) % cp_shard.size == 0
        return cp_shard.size > 1 and (self.exchange == "ring" or (self.exchange == "auto" and not divide))


class LocalAttention(AttentionLayer):
    """Causal softmax over a token's current block, optionally with the block before."""

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        assert form.near is not None
        assert form.near.block_size is not None
        self.block_size = form.near.block_size
        self.blocks = form.near.blocks
        self.near_window = (self.block_size, self.blocks)
        self.mixture = build_mixture(form.mixture, settings)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        priors, shift = priors_and_shift(self.mixture)
        state = inputs.state
        if inputs.cp_shard.size > 1:
            state = inputs.halo(pack_keys(k), v, self.block_size * self.blocks)
        return window_attention(
            q,
            k,
            v,
            block_size=self.block_size,
            blocks=self.blocks,
            priors=priors,
            shift=shift,
            rotary=inputs.rotary,
            positions=inputs.at,
            initial_state=state,
        )
