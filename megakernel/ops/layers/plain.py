"""The formulas in torch, on any device and in any dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `megakernel.ops.layers.rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `megakernel.ops.layers.layer_norm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """See `megakernel.ops.layers.swiglu`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.rotate`."""
    return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, N, d) alone, by angles (B or 1, N, d / 2)."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
