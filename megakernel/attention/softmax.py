"""Softmax attention: the quadratic baseline, and local attention (FLuRKA's window alone)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.mixture import build_mixture, priors_and_shift
from megakernel.attention.sequence import ContextParallelShard, Ulysses
from megakernel.config.attention import Attention
from megakernel.ops.documents import positions_with_halo
from megakernel.ops.mixture import pack_keys
from megakernel.ops.softmax_attention import softmax_attention
from megakernel.ops.softmax_attention.ring import ring_attention
from megakernel.ops.window_attention import window_attention


class SoftmaxAttention(AttentionLayer):
    """softmax(q k^T / sqrt(d)) v over the visible tokens of the document, or over the last `window` of them.

    With a soft cap c the exponents are c tanh(q k^T / (c sqrt(d))).

    Context-parallel shards whose `window` reaches no further than the shard before get its last tokens. Others use the
    Ulysses all-to-all if their heads divide, which balances the work, otherwise ring attention; `exchange` chooses.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.window, self.softcap = config.window, config.softcap
        self.reads_neighbor = config.reads_neighbor
        self.exchange = settings.softmax_exchange

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        shard, positions = inputs.cp_shard, inputs.resolved_positions
        real = None if self.causal else inputs.padding_mask
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "key_mask": real}
        if shard.size > 1 and self.exchange == "auto" and self.reads_neighbor(q.shape[2]):
            return self._attend_window(q, k, v, inputs), None
        if self._uses_ring(shard):
            return ring_attention(q, k, v, ring=shard, positions=positions, **options), None
        ulysses = Ulysses(shard, q.shape[1], k.shape[1])
        out, state = softmax_attention(
            ulysses.exchange_queries(q),
            *ulysses.exchange_keys(k, v),
            **options,
            softcap=self.softcap,
            positions=ulysses.whole_positions(positions, q.shape[2]),
            initial_state=inputs.state,
        )
        return ulysses.restore(out), state

    def _attend_window(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> Tensor:
        """The output of a shard of a sequence, from rotated keys and the last ones of the shard before it."""
        assert self.window is not None
        before = self.window - 1
        tail = inputs.halo(k, v, before)
        out, _ = softmax_attention(
            # Tokens without queries would need another form of every kernel.
            F.pad(q, (0, 0, before, 0)),
            torch.cat([tail.keys, k], 2),
            torch.cat([tail.values, v], 2),
            window=self.window,
            softcap=self.softcap,
            positions=positions_with_halo(
                inputs.resolved_positions, before, q, is_first=inputs.cp_shard.rank == 0
            ),
        )
        return out[:, :, before:]

    def _uses_ring(self, cp_shard: ContextParallelShard) -> bool:
        if self.softcap is not None:
            return False
        divides = len(self.query_heads) % cp_shard.size == 0
        return cp_shard.size > 1 and (self.exchange == "ring" or (self.exchange == "auto" and not divides))


class LocalAttention(AttentionLayer):
    """Causal softmax over a token's current block and optionally the previous one."""

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert config.near is not None
        assert config.near.block_size is not None
        self.block_size = config.near.block_size
        self.blocks = config.near.blocks
        self.near_window = (self.block_size, self.blocks)
        self.mixture = build_mixture(config.mixture, settings)

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
            positions=inputs.resolved_positions,
            initial_state=state,
        )
