"""The short convolution of queries, keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .layers import OPTIONAL


class ShortConvolution(nn.Module):
    """Causal depthwise convolution over the last W tokens of the document, then SiLU."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))

    def reset_parameters(self) -> None:
        """Random weights below 1 / sqrt(W)."""
        bound = self.weight.shape[1] ** -0.5
        init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, positions: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B, N, C) -> the same, and the last W - 1 tokens for later ones."""
        width, count = self.weight.shape[1], x.shape[1]
        before = x.new_zeros(len(x), width - 1, x.shape[2]) if state is None else state.to(x.dtype)
        tokens, total = torch.cat([before, x], 1), torch.zeros_like(x)
        for place in range(width):
            seen = tokens[:, place : place + count] * (positions >= width - 1 - place)[..., None]
            total = total + seen * self.weight[:, place]
        return F.silu(total), tokens[:, count:]


OPTIONAL["short_convolution"] = ShortConvolution
