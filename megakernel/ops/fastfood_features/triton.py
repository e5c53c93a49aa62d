"""FastFood features in Triton, registered as PyTorch operators; the inputs and log scales are saved for backward."""

import torch
from torch import Tensor

from megakernel.ops.fastfood_features import kernels
from megakernel.ops.fastfood_features.kernels import FeatureShape, Parts
from megakernel.ops.feature_maps import SAMPLED, Features
from megakernel.ops.kernels.features import cdiv, power_of_two
from megakernel.ops.kernels.launch import MIN_PROGRAMS, Rows, launch
from megakernel.ops.projections import FastFood

WIDEST = 1024
"""Most elements in all blocks of a token; they are in the registers of one program."""

TILE = 2048
"""Elements per tile: 16 in each of 128 threads. Backward holds five tiles at once."""

SPAN = 256
"""Most tokens per program; enough to make the partial sums of gradients small compared to the features."""


def unsupported(x: Tensor, projection: FastFood, *, feature_map: str) -> str | None:
    """Why the kernels do not support these arguments; None if they do."""
    if feature_map not in SAMPLED:
        return f"feature_map={feature_map!r}; expected one of {', '.join(SAMPLED)}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"x is {x.dtype}; expected bfloat16, float16 or float32"
    if (numbers := _padded_blocks(projection.scales)) > WIDEST:
        return f"blocks of {tuple(projection.scales.shape[1:])} have {numbers} elements; expected at most {WIDEST}"
    return None


def attend(x: Tensor, projection: FastFood, *, feature_map: str) -> Features:
    """Same arguments and results as `by_transforms`."""
    chunks = x.shape[2:4]
    values, logs = _forward(x.flatten(2, 3), *projection, feature_map)
    return Features(values.unflatten(2, chunks), logs.unflatten(2, chunks) if feature_map != "rks" else None)


@torch.library.custom_op("megakernel::fastfood_features", mutates_args=())
def _forward(
    x: Tensor, scales: Tensor, gaussians: Tensor, signs: Tensor, permutation: Tensor, feature_map: str
) -> tuple[Tensor, Tensor]:
    """Features (B, H_kv, N, F) float32 of x (B, H_kv, N, d), and log scales (B, H_kv, N), for rks (B, H_kv, 0)."""
    features, logs = _empty_outputs(x, scales, gaussians, signs, permutation, feature_map)
    parts = _parts(scales, gaussians, signs, permutation)
    grid, meta = _grid_and_sizes(x, scales, feature_map)
    if x.numel():
        sizes = (x.shape[2], x.shape[1])
        launch(kernels.write_features, grid, Rows.of(x), parts, features, logs, *sizes, META=meta, warps=4)
    return features, logs


@_forward.register_fake
def _empty_outputs(x, scales, gaussians, signs, permutation, feature_map):
    features = scales.shape[1] * x.shape[-1] * (2 if feature_map == "rks" else 1)
    values = x.new_empty(*x.shape[:3], features, dtype=torch.float32)
    logs = x.new_empty(*x.shape[:2], 0 if feature_map == "rks" else x.shape[2], dtype=torch.float32)
    return values, logs


@torch.library.custom_op("megakernel::fastfood_features_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    scales: Tensor,
    gaussians: Tensor,
    signs: Tensor,
    permutation: Tensor,
    logs: Tensor,
    feature_map: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of the three diagonals (3, H_kv, blocks, n) float32. grad: of the features."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    parts = _parts(scales, gaussians, signs, permutation)
    grid, meta = _grid_and_sizes(x, scales, feature_map)
    batch, heads, length, _ = x.shape
    shares = x.new_empty(3, batch, heads, grid[1], *scales.shape[1:], dtype=torch.float32)
    if x.numel():
        inverse = parts.permutation.argsort(-1)
        inputs = (grad.contiguous(), Rows.of(x), parts, inverse, logs)
        launch(kernels.write_gradients, grid, *inputs, dx, shares, length, heads, META=meta, warps=4)
    return dx, shares.sum((1, 3))


@_backward.register_fake
def _empty_gradients(grad, x, scales, gaussians, signs, permutation, logs, feature_map):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(3, *scales.shape, dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.feature_map = inputs
    # Log scales are constants to autograd: the product does not depend on how it is split.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx, grad, _):
    if grad is None:
        return (None,) * 6
    dx, of_diagonals = _backward(grad, *ctx.saved_tensors, ctx.feature_map)
    diagonals = ctx.saved_tensors[1:4]
    return dx, *(total.to(part.dtype) for total, part in zip(of_diagonals, diagonals)), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _padded_blocks(scales: Tensor) -> int:
    """K, the elements in all blocks of a token, with the number of blocks padded to a power of two."""
    return power_of_two(scales.shape[1]) * scales.shape[2]


def _parts(*parts: Tensor) -> Parts:
    return Parts(*(part.contiguous() for part in parts))


def _grid_and_sizes(x: Tensor, scales: Tensor, feature_map: str) -> tuple[tuple[int, int], FeatureShape]:
    """The grid and the compile-time sizes of both kernels; spans are short enough for MIN_PROGRAMS programs."""
    batch, heads, length, width = x.shape
    numbers = _padded_blocks(scales)
    tokens = max(1, TILE // numbers)
    for_programs = power_of_two(max(1, batch * heads * length // MIN_PROGRAMS))
    span = max(tokens, min(SPAN, for_programs))
    blocks, size = scales.shape[1:]
    meta = FeatureShape(span, tokens, blocks, size, numbers, width, feature_map)
    return (batch * heads, cdiv(length, span)), meta
