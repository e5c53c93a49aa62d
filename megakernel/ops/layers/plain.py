"""The formulas in torch, on any device and in any dtype."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = {"cpu": 512, "cuda": 4096}
"""Vectors whose float32 copies RMSNorm's backward holds at a time: they fit in a CPU's cache, or need few launches."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See `megakernel.ops.layers.rms_norm`."""
    if not torch.is_grad_enabled():
        return _normed(x, weight, eps, offset)
    normed: Tensor = _RmsNorm.apply(x, weight, eps, offset)
    return normed


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    # A half would lose of 1 + w what w has beyond 8 bits of 1.
    precise = _precise(x)
    return F.rms_norm(x.to(precise), weight.shape, weight.to(precise) + offset, eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """Torch's RMSNorm, keeping x alone for backward.

    Torch's own graph keeps two float32 copies of a bfloat16 x: at a million tokens, a quarter of what a layer takes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return _normed(x, weight, eps, offset)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        precise = _precise(x)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dweight = torch.zeros_like(weight, dtype=precise)
        width = weight.numel()
        rows = (t.reshape(-1, width).split(ROWS.get(x.device.type, ROWS["cuda"])) for t in (x, grads[0], dx))
        for some_x, some_grad, some_dx in zip(*rows, strict=True):
            some_x, some_grad = some_x.to(precise), some_grad.to(precise)
            scale = torch.rsqrt(some_x.square().mean(-1, keepdim=True) + ctx.eps)
            normed = some_x * scale
            dweight += (some_grad * normed).sum(0)
            some_grad = some_grad * (weight.to(precise) + ctx.offset)
            some_dx.copy_(scale * (some_grad - normed * (some_grad * normed).mean(-1, keepdim=True)))
        return dx, dweight.to(weight.dtype), None, None


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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
