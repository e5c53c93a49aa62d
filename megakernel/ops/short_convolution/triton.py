"""The short convolution in Triton, registered as PyTorch operators; only the inputs are saved for backward."""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.kernels.launch import MIN_PROGRAMS, Rows, contiguous_rows, launch
from megakernel.ops.kernels.primitives import cdiv, power_of_two
from megakernel.ops.short_convolution import kernels
from megakernel.ops.short_convolution.kernels import FilterShape

WIDEST = 256
"""Largest d; a program holds all channels of its heads."""

LONGEST = 8
"""Largest W; a program holds W tokens, W filters and the gradients of both."""

TILE = 512
"""Channels of a program for up to four taps, four per thread; half as many for more taps, which would spill."""

TOKENS_AT_ONCE = 4
"""Tokens that each thread loads before it uses the first: more would leave registers for fewer programs."""

SPAN = 128
"""Most tokens per program; enough to make the partial gradients of filters small compared to the tokens."""


def unsupported(x: Tensor, weight: Tensor, before: Tensor | None, positions: Positions) -> str | None:
    """Why the kernels do not support these arguments; None if they do."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x.dtype}; expected bfloat16, float16 or float32"
    if x.shape[-1] > WIDEST or weight.shape[-1] > LONGEST:
        return f"{weight.shape[-1]} taps of {x.shape[-1]} channels; expected at most {LONGEST} of at most {WIDEST}"
    return None


def attend(x: Tensor, weight: Tensor, before: Tensor | None, positions: Positions) -> Tensor:
    """Same arguments and results as `by_taps`; the output has the memory layout of a dense x with contiguous rows."""
    rows, filters = contiguous_rows(x.flatten(1, -3)), weight.flatten(0, -3)
    rows_before = None if before is None else contiguous_rows(before.flatten(1, -3))
    if isinstance(positions, int):
        # From position W - 1 on, filters lie within the document, so larger positions make no difference.
        out = _forward(rows, rows_before, filters, None, min(positions, weight.shape[-1]))
    else:
        out = _forward(rows, rows_before, filters, positions.expand(len(x), -1).contiguous(), 0)
    return out.unflatten(1, x.shape[1:-2])


@torch.library.custom_op("megakernel::short_convolution", mutates_args=())
def _forward(
    x: Tensor, before: Tensor | None, weight: Tensor, positions: Tensor | None, start: int
) -> Tensor:
    """The output (B, R, N, d) for x of the same shape, `before` (B, R, W - 1, d) and weight (R, d, W)."""
    out = torch.empty_like(x)
    if out.numel():
        grid, meta = _grid_and_sizes(x, weight)
        inputs = _inputs(x, before, weight, positions)
        launch(kernels.convolve, grid, *inputs, Rows.to_write(out), x.shape[2], start, META=meta, warps=4)
    return out


@_forward.register_fake
def _empty_output(x, before, weight, positions, start):
    return torch.empty_like(x)


@torch.library.custom_op("megakernel::short_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    before: Tensor | None,
    weight: Tensor,
    positions: Tensor | None,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of `before` (empty if that is None), and of weight (R, d, W) in float32."""
    dx, dbefore = torch.empty_like(x), x.new_empty(0) if before is None else torch.zeros_like(before)
    grid, meta = _grid_and_sizes(x, weight)
    shares = x.new_empty(len(x), grid[0], *weight.shape, dtype=torch.float32)
    if x.numel():
        outputs = (Rows.to_write(dx), None if before is None else Rows.to_write(dbefore), shares)
        inputs = (*_inputs(x, before, weight, positions), Rows.of(grad))
        arguments = (*inputs, *outputs, x.shape[2], start)
        launch(kernels.convolve_backward, grid, *arguments, META=meta, warps=4)
    return dx, dbefore, shares.sum((0, 1))


@_backward.register_fake
def _empty_gradients(grad, x, before, weight, positions, start):
    dbefore = x.new_empty(0) if before is None else torch.empty_like(before)
    return torch.empty_like(x), dbefore, weight.new_empty(weight.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.start = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    x, before, weight, positions = ctx.saved_tensors
    dx, dbefore, dweight = _backward(grad, x, before, weight, positions, ctx.start)
    return dx, None if before is None else dbefore, dweight.to(weight.dtype), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _inputs(x: Tensor, before: Tensor | None, weight: Tensor, positions: Tensor | None) -> tuple[Any, ...]:
    """The first arguments of both kernels."""
    return Rows.of(x), None if before is None else Rows.of(before), weight.contiguous(), positions


def _grid_and_sizes(x: Tensor, weight: Tensor) -> tuple[tuple[int, int, int], FilterShape]:
    """The grid and the compile-time sizes; spans are short enough for about MIN_PROGRAMS programs."""
    batch, heads, length, channels = x.shape
    width, padded = weight.shape[-1], power_of_two(channels)
    heads_at_once = max(1, (TILE if width <= 4 else TILE // 2) // padded)
    blocks = cdiv(heads, heads_at_once)
    for_programs = power_of_two(max(1, batch * blocks * length // MIN_PROGRAMS))
    span = max(TOKENS_AT_ONCE, min(SPAN, for_programs))
    meta = FilterShape(width, heads, channels, padded, heads_at_once, TOKENS_AT_ONCE, span)
    return (cdiv(length, span), blocks, batch), meta
