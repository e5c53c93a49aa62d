"""The formulas of `megakernel.ops.layers` in torch, on any device and in any dtype.

Their own autograd functions save less for backward and write gradients in place. A compiler gets the formulas alone: it
fuses them with what is around them, and decides itself what backward recomputes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = {"cpu": 512, "cuda": 4096}
"""Vectors that go through an op at once: they fit a CPU's cache, or need few GPU launches."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """See `megakernel.ops.layers.rms_norm`."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _normed(x, weight, eps, offset)
    normed: Tensor = _RmsNorm.apply(x, weight, eps, offset)
    return normed


def rms_norm_and_residual(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.rms_norm_and_residual`."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _normed(x, weight, eps, offset), x
    both: tuple[Tensor, Tensor] = _RmsNormAndResidual.apply(x, weight, eps, offset)
    return both


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    # In half precision 1 + w would lose digits of w.
    precise = _precise(x)
    return F.rms_norm(x.to(precise), weight.shape, weight.to(precise) + offset, eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """torch's RMSNorm, saving only x for backward.

    torch saves two float32 copies of a bfloat16 x: at a million tokens, a quarter of a layer's activation memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return _normed(x, weight, eps, offset)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """grads: of the norm, and if x was returned, too, of x."""
        x, weight = ctx.saved_tensors
        precise = _precise(x)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dweight = torch.zeros_like(weight, dtype=precise)
        for x_rows, dx_rows, grad_rows, *of_residual in _rows(x, dx, *grads):
            x_rows, grad_rows = x_rows.to(precise), grad_rows.to(precise)
            scale = torch.rsqrt(x_rows.square().mean(-1, keepdim=True) + ctx.eps)
            normed = x_rows * scale
            dweight += (grad_rows * normed).sum(0)
            grad_rows = grad_rows * (weight.to(precise) + ctx.offset)
            of_norm = scale * (grad_rows - normed * (grad_rows * normed).mean(-1, keepdim=True))
            dx_rows.copy_(sum(of_residual, of_norm))
        return dx, dweight.to(weight.dtype), None, None


class _RmsNormAndResidual(_RmsNorm):
    """The same, which also returns x."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        return _RmsNorm.forward(ctx, x, weight, eps, offset), x


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Vectors of all tensors, ROWS at once."""
    at_once = ROWS.get(tensors[0].device.type, ROWS["cuda"])
    return zip(*(x.reshape(-1, x.shape[-1]).split(at_once) for x in tensors), strict=True)


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.add_rms_norm`."""
    return rms_norm_and_residual(residual + x, weight, eps, offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `megakernel.ops.layers.layer_norm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def swiglu(x: Tensor) -> Tensor:
    """See `megakernel.ops.layers.swiglu`."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        active: Tensor = _SwiGlu.apply(x)
        return active
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up, saving only x; both halves of its gradient are written where the projection reads them.

    torch would save silu(gate), too, and join the halves with another pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        for x_rows, out_rows in _rows(x, out):
            gate, up = x_rows.chunk(2, -1)
            torch.mul(F.silu(gate), up, out=out_rows)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        for x_rows, grad, dx_rows in _rows(x, grads[0], dx):
            (gate, up), (dgate, dup) = x_rows.chunk(2, -1), dx_rows.chunk(2, -1)
            active = F.silu(gate)
            torch.mul(grad, active, out=dup)
            torch.ops.aten.silu_backward(torch.mul(grad, up, out=active), gate, grad_input=dgate)
        return dx


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `megakernel.ops.layers.rotate`."""
    return rotate_one(q, cos, sin), rotate_one(k, cos, sin)


def rotate_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` of a single tensor x (B, H, N, d), with cos and sin (B or 1, N, d / 2)."""
    cos, sin = cos[:, None], sin[:, None]
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
