"""Simple gated linear attention: linear attention whose state decays by a scalar factor per head and token."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.config.algebra import SimpleGla
from megakernel.config.attention import Attention
from megakernel.ops.simple_gla import simple_gla
from megakernel.ops.tensors import accum_dtype


class SimpleGlaAttention(AttentionLayer):
    """q_i^T S_i / sqrt(d) with a state S that decays by one factor per key head (docs/formulas.md, 9).

    w.x_i is the layer's further projection of the hidden state.
    Context-parallel shards exchange states and their decay factors.
    """

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        options = config.simple_gla or SimpleGla()
        self.decay, self.normalizer = options.decay, options.gate_logit_normalizer
        if self.decay == "gate":
            self.decay_bias = nn.Parameter(torch.zeros(len(self.kv_heads)))
        elif self.decay == "step":
            rates, steps = _initial_rates_and_steps(settings, self.kv_heads)
            # The inverse of softplus: softplus(decay_bias) is the initial step.
            self.decay_bias = nn.Parameter((steps + (-torch.expm1(-steps)).log()).float())
            self.log_decay_rate = nn.Parameter(rates.log().float())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        log_decay, step = self.log_decay_and_step(inputs, k)
        return simple_gla(
            q,
            k,
            v,
            log_decay,
            value_scale=step,
            positions=inputs.resolved_positions,
            initial_state=inputs.state,
            exchange=inputs.exchange,
        )

    def log_decay_and_step(self, inputs: AttentionInputs, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """log a (B, H_kv, N), or (H_kv, 1) or () if it is fixed, and the step that scales v, or None."""
        dtype = accum_dtype(k.dtype)
        if self.decay == "none":
            return torch.zeros((), dtype=dtype, device=k.device), None
        if self.decay == "fixed":
            return fixed_decay(self.kv_heads, k), None
        logits = decay_logits(self.heads.of_key_head(self.decay_bias), inputs, k)
        if self.decay == "gate":
            return F.logsigmoid(logits) / self.normalizer, None
        step = F.softplus(logits)
        return -self.heads.of_key_head(self.log_decay_rate).to(dtype).exp()[:, None] * step, step


def fixed_decay(kv_heads: range, like: Tensor) -> Tensor:
    """log(1 - 2^(-5-h)) of key heads h, (H_kv, 1), in float32 or better."""
    heads = torch.arange(kv_heads.start, kv_heads.stop, device=like.device, dtype=accum_dtype(like.dtype))
    return torch.log1p(-torch.exp2(-5 - heads))[:, None]


def decay_logits(bias: Tensor, inputs: AttentionInputs, like: Tensor) -> Tensor:
    """w.x_i + b with bias b (H_kv,): (B, H_kv, N), in float32 or better."""
    assert inputs.further is not None
    dtype = accum_dtype(like.dtype)
    return bias.to(dtype)[:, None] + inputs.further[..., 0].to(dtype)


def _initial_rates_and_steps(settings: LayerSettings, heads: range) -> tuple[Tensor, Tensor]:
    """Mamba-2's initial A, uniform in [1, 16], and step, log-uniform in [0.001, 0.1], per head in float64."""
    draws = (generator(settings.seed, head, "decay") for head in heads)
    pairs = [torch.rand(2, generator=draw, dtype=torch.float64, device="cpu") for draw in draws]
    rates, steps = torch.stack(pairs).to(torch.get_default_device()).T
    return 1 + 15 * rates, (math.log(0.001) + steps * math.log(100)).exp()
