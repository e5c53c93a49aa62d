"""Simple gated linear attention: a state of which each token keeps a part."""

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
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.simple_gla import simple_gla


class SimpleGlaAttention(AttentionLayer):
    """q_i^T S_i / sqrt(d) of a state that decays by one factor for each key head (docs/formulas.md, 9).

    w.x_i is the layer's further projection of the hidden state; without it the decay does not depend on the token.
    Shards of a sequence exchange states and the factors by which they decay.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        chosen = form.simple_gla or SimpleGla()
        self.decay, self.normalizer = chosen.decay, chosen.gate_logit_normalizer
        if self.decay == "gate":
            self.decay_bias = nn.Parameter(torch.zeros(len(self.kv_heads)))
        elif self.decay == "step":
            rates, steps = _initial_rates_and_steps(settings, self.kv_heads)
            # Softplus of the bias is the step.
            self.decay_bias = nn.Parameter((steps + (-torch.expm1(-steps)).log()).float())
            self.log_decay_rate = nn.Parameter(rates.log().float())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        log_decay, step = self.log_decay_and_step(inputs, k)
        return simple_gla(
            q,
            k,
            v if step is None else (v * step[..., None]).to(v.dtype),
            log_decay,
            positions=inputs.at,
            initial_state=inputs.state,
            exchange=inputs.exchange,
        )

    def log_decay_and_step(self, inputs: AttentionInputs, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """log a (B, H_kv, N), or (H_kv, 1) or () where it does not depend on the token, and the step that scales v."""
        dtype = accum_dtype(k.dtype)
        if self.decay == "none":
            return torch.zeros((), dtype=dtype, device=k.device), None
        if self.decay == "fixed":
            return fixed_decay(self.kv_heads, k), None
        logits = decay_logits(self.decay_bias, inputs, k)
        if self.decay == "gate":
            return F.logsigmoid(logits) / self.normalizer, None
        step = F.softplus(logits)
        return -self.log_decay_rate.to(dtype).exp()[:, None] * step, step


def fixed_decay(kv_heads: range, like: Tensor) -> Tensor:
    """log(1 - 2^(-5-h)) of key heads h, (H_kv, 1), in float32 or better."""
    heads = torch.arange(kv_heads.start, kv_heads.stop, device=like.device, dtype=accum_dtype(like.dtype))
    return torch.log1p(-torch.exp2(-5 - heads))[:, None]


def decay_logits(bias: Tensor, inputs: AttentionInputs, like: Tensor) -> Tensor:
    """w.x_i + b of bias b (H_kv,), (B, H_kv, N), or (H_kv, 1) without a projection; in float32 or better."""
    logits = bias.to(accum_dtype(like.dtype))[:, None]
    return logits if inputs.further is None else logits + inputs.further[..., 0].to(logits.dtype)


def _initial_rates_and_steps(settings: LayerSettings, heads: range) -> tuple[Tensor, Tensor]:
    """Mamba-2's initial A and step of each head, float64: uniform in [1, 16], log-uniform in [0.001, 0.1]."""
    draws = (generator(settings.seed, head, "decay") for head in heads)
    rates, steps = torch.stack([torch.rand(2, generator=draw, dtype=torch.float64) for draw in draws]).T
    return 1 + 15 * rates, (math.log(0.001) + steps * math.log(100)).exp()
