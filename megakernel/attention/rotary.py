"""Rotary position embedding."""

import torch
from torch import Tensor

from megakernel.ops.layers import rotate
from megakernel.ops.layers.plain import turned


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
        return turned(x, *self._angles(positions, x))

    def both(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (B, H, N, head_dim) and k (B, H_kv, N, head_dim) at the same positions."""
        return rotate(q, k, *self._angles(positions, q))

    def _angles(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B or 1, N, head_dim / 2), in float32 or better."""
        # Angles in float64: at position 10^6 a float32 angle is off by 0.06.
        exponents = torch.arange(0, self.head_dim, 2, device=like.device, dtype=torch.float64) / self.head_dim
        angles = positions[..., None] * self.base**-exponents
        wide = torch.promote_types(like.dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)
