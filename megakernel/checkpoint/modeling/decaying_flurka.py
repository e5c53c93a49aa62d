"""Causal FLuRKA whose landmarks lose weight with every block that ends after them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration import MegakernelConfig
from .flurka import FlurkaAttention
from .layers import Rotary, precise


class DecayingFlurkaAttention(FlurkaAttention, kind="decaying_flurka"):
    """far_decay `fixed`: the factor 1 - 2^(-5-h) of key head h; `gate`: sigmoid(w.x + b)^(1/16) of the last token."""

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__(config, options, rotary)
        self.has_decay = options["far_decay"] == "gate"
        if self.has_decay:
            self.decay_bias = nn.Parameter(torch.empty(self.kv_heads))

    def log_decay(self, k: Tensor, logits: Tensor | None) -> Tensor:
        """See FlurkaAttention."""
        none = precise(k).new_zeros(k.shape[:3])
        if logits is None:
            heads = torch.arange(self.kv_heads, device=k.device, dtype=none.dtype)
            return none + torch.log1p(-torch.exp2(-5 - heads))[:, None]
        return F.logsigmoid(logits.to(none.dtype) + self.decay_bias.to(none.dtype)[:, None]) / 16
