"""Causal FLuRKA: kernel attention to landmarks of earlier blocks, exact to the current block (docs/formulas.md, 4)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.compression import pooling_logits
from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.map_parameters import build_projection
from megakernel.attention.mixture import build_mixture, priors_and_shift
from megakernel.attention.near_far import NearFarAttention
from megakernel.attention.simple_gla import decay_logits, fixed_decay
from megakernel.config.algebra import BlockCompression
from megakernel.config.attention import Attention
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.flurka_attention.options import FlurkaState
from megakernel.ops.mixture import pack_keys
from megakernel.ops.tensors import accum_dtype

DECAY_NORMALIZER = 16.0
"""log a of a block is log sigmoid of its gate divided by this; for tokens, see `simple_gla.gate_logit_normalizer`."""


class FlurkaAttention(NearFarAttention):
    """Kernel attention to low-rank landmarks of the far context, exact attention to the local window.

    If a softmax window and the landmarks share one normalizer, a landmark weighs m phi(q).phi(k) / phi(0).phi(0). The
    softmax gives weight 1 to unrelated queries and keys, phi alone another one (hedgehog 2 / d, elu d): without the
    quotient gamma would have to learn that scale first.

    Mixture keys: E pools each key of a token separately, and a token or landmark with keys k_r weighs
    sum_r pi_r s(q, k_r), where s is phi(q).phi(k) far and the window's similarity near. Priors belong to keys, whatever
    s is. So a window as long as the sequence is the softmax mixture of docs/formulas.md, 6, a window under phi with
    r = b is MLK, and m remains the landmark token count, because near and far weigh a token by sum_r pi_r.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        assert isinstance(config.compression, BlockCompression)
        assert config.feature_map is not None
        self.projection = build_projection(config.feature_map, settings)
        self.mixture = build_mixture(config.mixture, settings)
        logits = pooling_logits(self.rank, self.block_size)
        self.per_head = config.compression.per_head
        if self.per_head:
            logits = logits.repeat(len(self.kv_heads), 1, 1)
        else:
            self.shared = ("pool_keys", "pool_values")
        self.pool_keys = nn.Parameter(logits.clone())
        self.pool_values = None if config.compression.share_kv else nn.Parameter(logits.clone())
        self.create_merge_parameters()
        self.far_decay = config.far_decay
        if self.far_decay == "gate":
            self.decay_bias = nn.Parameter(torch.zeros(len(self.kv_heads)))
        at_zero = config.feature_map.similarity_at_zero(self.head_dim)
        self.matched_scale = -math.log(at_zero) if at_zero else 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        projection = self.projection()
        priors, shift = priors_and_shift(self.mixture)
        state = inputs.state
        if inputs.cp_shard.size > 1:
            state = FlurkaState(None, inputs.halo(pack_keys(k), v, self.reach))
        pool_keys = self._pool(self.pool_keys)
        return flurka_attention(
            q,
            k,
            v,
            feature_map=self.projection.feature_map,
            projection=projection,
            pool_keys=pool_keys,
            pool_values=pool_keys if self.pool_values is None else self._pool(self.pool_values),
            near=self.near.kind,
            blocks=self.near.blocks,
            priors=priors,
            shift=shift,
            gate=self.gate_bias_logits(),
            gate_weight=getattr(self, "gate_weight", None),
            far_mass=self.heads.of_key_head(self.far_mass) if self.near.kind == "kernel" else None,
            far_weight=self._far_scale(),
            log_decay=self._log_decay(inputs, v),
            rotary=inputs.rotary,
            far_rope=self.far_rope,
            positions=inputs.resolved_positions,
            initial_state=state,
            return_state=inputs.return_state,
            exchange=inputs.exchange,
        )

    def _log_decay(self, inputs: AttentionInputs, like: Tensor) -> Tensor | None:
        """Log decay (B, H_kv, N), or (H_kv, 1) if fixed, of earlier landmarks at a token that ends a block, or None."""
        if self.far_decay == "none":
            return None
        if self.far_decay == "fixed":
            return fixed_decay(self.kv_heads, like)
        bias = self.heads.of_key_head(self.decay_bias)
        return F.logsigmoid(decay_logits(bias, inputs, like)) / DECAY_NORMALIZER

    def _pool(self, logits: Tensor) -> Tensor:
        logits = self.heads.of_key_head(logits) if self.per_head else self.heads.shared(logits)
        return logits.softmax(-1, dtype=accum_dtype(logits.dtype))

    def _far_scale(self) -> Tensor | None:
        """Log weight (H,) of the far part under a shared normalizer; None if it has its own."""
        if self.near.kind == "kernel" or self.is_gated:
            return None
        return self.far_weight.to(accum_dtype(self.far_weight.dtype)) + self.matched_scale
