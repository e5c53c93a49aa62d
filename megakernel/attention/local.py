"""Windowed softmax attention: FLuRKA's near part alone."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.mixture import build_mixture, priors_and_shift
from megakernel.config.attention import Attention
from megakernel.ops import window_attention
from megakernel.ops.mixture import pack_keys


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
