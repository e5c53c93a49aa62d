"""Normalization that works on sequence shards (Megatron's wrapped torch norm refuses sequence parallelism)."""

import torch
from torch import Tensor, nn

from megakernel.ops.layers import layer_norm, rms_norm
from megakernel.parallel import replicated

from .settings import ModelSettings


class HeadNorm(nn.Module):
    """RMSNorm of each head's vectors, with one weight for the heads of all tensor ranks."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.eps = settings.model.norm_eps
        self.group = settings.mesh.tp.group if settings.mesh.tp.size > 1 else None
        self.weight = nn.Parameter(torch.ones(settings.model.head_size))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., head_dim) -> the same shape and dtype."""
        return rms_norm(x, replicated(self.weight, self.group), self.eps)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in float32.

    Under sequence parallelism each tensor rank sees part of the tokens, so the gradients of the replicated weights
    are summed over the tensor ranks.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.kind = settings.model.norm
        self.eps = settings.model.norm_eps
        self.group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        self.weight = nn.Parameter(torch.ones(settings.model.hidden_size))
        self.bias = (
            nn.Parameter(torch.zeros(settings.model.hidden_size)) if self.kind == "layernorm" else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden_size) -> the same shape and dtype."""
        weight = replicated(self.weight, self.group)
        if self.kind == "rmsnorm":
            return rms_norm(x, weight, self.eps)
        assert self.bias is not None
        return layer_norm(x, weight, replicated(self.bias, self.group), self.eps)
