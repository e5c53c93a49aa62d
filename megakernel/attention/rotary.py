"""Rotary position embedding."""

import torch
from torch import Tensor


class Rotary:
    """Rotates pairs (x_j, x_{j + d/2}) by position * base^(-2j/d).

    A dot product of two rotated vectors depends on the difference of their positions only.
    """

    def __init__(self, head_dim: int, base: float = 10_000.0):
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: rotary positions need an even width")
        self.head_dim = head_dim
        self.base = base

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, N, head_dim) at positions (B, N) or (1, N), whole or fractional; dtype of x."""
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (part[:, None].to(wide) for part in self.cos_sin(positions))
        first, second = x.to(wide).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at positions (...), (..., head_dim / 2) float64."""
        # Angles in float64: at position 10^6 a float32 angle is off by 0.06.
        exponents = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions[..., None] * self.base ** -(exponents / self.head_dim)
        return angles.cos(), angles.sin()
