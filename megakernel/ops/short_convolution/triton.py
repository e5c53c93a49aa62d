"""The short convolution in Triton, registered as PyTorch operators; only the inputs are saved for backward."""

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.kernels.features import cdiv, padded, power_of_two
from megakernel.ops.kernels.launch import MIN_PROGRAMS, launch
from megakernel.ops.short_convolution import kernels
from megakernel.ops.short_convolution.kernels import FilterShape

WIDEST = 256
"""Largest d; a program holds all channels of its tokens."""

LONGEST = 8
"""Largest W; taps are unrolled."""

TILE = 2048
"""Elements per tile for up to four taps: 16 in each of 128 threads. With more taps, half as many, to spill less."""

SPAN = 512
"""Most tokens per program; enough to make the partial gradients of filters small compared to the tokens."""


def unsupported(x: Tensor, weight: Tensor, before: Tensor, positions: Positions) -> str | None:
    """Why the kernels do not support these arguments; None if they do."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x.dtype}; expected bfloat16, float16 or float32"
    if x.shape[-1] > WIDEST or weight.shape[-1] > LONGEST:
        return f"{weight.shape[-1]} taps of {x.shape[-1]} channels; expected at most {LONGEST} of at most {WIDEST}"
    if (x.shape[-2] + LONGEST) * x.shape[-1] >= 2**31:
        # Offsets within a head have 32 bits; with 64, backward would spill.
        return f"x has {x.shape[-2]} tokens of {x.shape[-1]} channels; expected fewer than 2^31 elements per head"
    return None


def attend(x: Tensor, weight: Tensor, before: Tensor, positions: Positions) -> Tensor:
    """Same arguments and results as `by_taps`."""
    inputs = torch.cat([before, x], -2).flatten(1, -3)
    filters = weight.flatten(0, -3)
    if isinstance(positions, int):
        # From position W - 1 on, filters lie within the document, so larger positions make no difference.
        out = _forward(inputs, filters, None, min(positions, weight.shape[-1]))
    else:
        out = _forward(inputs, filters, positions.expand(len(x), -1).contiguous(), 0)
    return out.view(x.shape)


@torch.library.custom_op("megakernel::short_convolution", mutates_args=())
def _forward(inputs: Tensor, weight: Tensor, positions: Tensor | None, start: int) -> Tensor:
    """The output (B, R, N, d) for inputs (B, R, W - 1 + N, d) and weight (R, d, W)."""
    out = _empty_output(inputs, weight, positions, start)
    heads, length = out.shape[1:3]
    if out.numel():
        grid, meta = _grid_and_sizes(out, weight, length)
        arguments = (inputs, weight.contiguous(), positions, out, length, start, heads)
        launch(kernels.convolve, grid, *arguments, META=meta, warps=4)
    return out


@_forward.register_fake
def _empty_output(inputs, weight, positions, start):
    batch, heads, count, width = inputs.shape
    return inputs.new_empty(batch, heads, count - weight.shape[-1] + 1, width)


@torch.library.custom_op("megakernel::short_convolution_backward", mutates_args=())
def _backward(
    grad: Tensor, inputs: Tensor, weight: Tensor, positions: Tensor | None, start: int
) -> tuple[Tensor, Tensor]:
    """Gradients of inputs, and of weight (R, d, W) in float32."""
    heads, length = grad.shape[1:3]
    dinputs = torch.empty_like(inputs)
    grid, meta = _grid_and_sizes(grad, weight, inputs.shape[2])
    shares = inputs.new_zeros(*inputs.shape[:2], grid[1], meta.width, meta.channels, dtype=torch.float32)
    if grad.numel():
        arguments = (inputs, weight.contiguous(), positions, grad.contiguous(), dinputs, shares)
        launch(kernels.convolve_backward, grid, *arguments, length, start, heads, META=meta, warps=4)
    else:
        dinputs.zero_()
    return dinputs, shares.sum((0, 2)).transpose(-1, -2).flip(-1)


@_backward.register_fake
def _empty_gradients(grad, inputs, weight, positions, start):
    return torch.empty_like(inputs), weight.new_empty(weight.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.start = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    inputs, weight, positions = ctx.saved_tensors
    dinputs, dweight = _backward(grad, inputs, weight, positions, ctx.start)
    return dinputs, dweight.to(weight.dtype), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _grid_and_sizes(out: Tensor, weight: Tensor, count: int) -> tuple[tuple[int, int], FilterShape]:
    """The grid over `count` tokens and the compile-time sizes; spans are short enough for MIN_PROGRAMS programs."""
    channels, width = out.shape[-1], weight.shape[-1]
    tokens = max(8, (TILE if width <= 4 else TILE // 2) // padded(channels))
    for_programs = power_of_two(max(1, out.shape[0] * out.shape[1] * count // MIN_PROGRAMS))
    span = max(tokens, min(SPAN, for_programs))
    meta = FilterShape(width, power_of_two(width), channels, padded(channels), tokens, span)
    return (out.shape[0] * out.shape[1], cdiv(count, span)), meta
