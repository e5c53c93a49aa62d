"""Vectors of positions that are added to embeddings."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration import MegakernelConfig
from .layers import OPTIONAL


class LearnedPositions(nn.Module):
    """Adds a learned vector per position."""

    def __init__(self, config: MegakernelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.max_positions or 0, config.hidden_size))
        self.std = config.embedding_initializer_range or config.initializer_range

    def reset_parameters(self) -> None:
        """Random vectors, as those of tokens."""
        init.normal_(self.weight, std=self.std)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden (B, N, C), positions (B, N)."""
        if (last := int(positions.max())) >= len(self.weight):
            raise ValueError(
                f"a text of {last + 1} tokens exceeds the model's {len(self.weight)} learned positions; "
                "give a shorter text or a smaller max_new_tokens"
            )
        return hidden + self.weight[positions]


class SinusoidalPositions(nn.Module):
    """Adds sines and cosines with wavelengths from 2 pi to 10,000 x 2 pi tokens."""

    def __init__(self, config: MegakernelConfig):
        super().__init__()
        self.amplitude = (config.embedding_initializer_range or config.initializer_range) * 2**0.5

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """hidden (B, N, C), positions (B, N)."""
        width = hidden.shape[-1]
        exponents = torch.arange(0, width, 2, device=hidden.device, dtype=torch.float64) / width
        angles = positions[..., None] * 10_000.0**-exponents
        waves = torch.cat([angles.sin(), angles.cos()], -1)[..., :width]
        return hidden + (self.amplitude * waves).to(hidden.dtype)


OPTIONAL |= {"learned": LearnedPositions, "sinusoidal": SinusoidalPositions}
