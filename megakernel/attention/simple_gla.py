"""Simple gated linear attention: each token says how much of the state before it stays."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.config.algebra import SimpleGla
from megakernel.config.attention import Attention
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.simple_gla import simple_gla


class SimpleGlaAttention(AttentionLayer):
    """q_i^T S_i / sqrt(d) of a state that decays by sigmoid(w.x_i + b)^(1 / normalizer) for each key head.

    w.x_i is the layer's further projection of the hidden state; without it the decay does not depend on the token.
    Shards of a sequence exchange states and the factors by which they decay.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        self.normalizer = (form.simple_gla or SimpleGla()).gate_logit_normalizer
        self.decay_bias = nn.Parameter(torch.zeros(len(self.kv_heads)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        logits = self.decay_bias.to(accum_dtype(k.dtype))[:, None]
        if inputs.further is not None:
            logits = logits + inputs.further[..., 0].to(logits.dtype)
        return simple_gla(
            q,
            k,
            v,
            F.logsigmoid(logits) / self.normalizer,
            positions=inputs.at,
            initial_state=inputs.state,
            exchange=inputs.exchange,
        )
