"""Weighted attention on a GPU: launches of the kernels in `kernels`, and their autograd."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.kernels.launch import Rows, launch
from megakernel.ops.kernels.primitives import cdiv, padded
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.weighted_attention import kernels
from megakernel.ops.weighted_attention.kernels import Pairs, Visible, Weighting
from megakernel.ops.weighted_attention.weights import WeightOptions

WIDEST = 256
"""The largest d and D: a program holds whole rows."""

MOST_KEYS = 4
"""The largest M: a program holds the gradients of all keys of its positions."""

LAUNCH = {"warps": 8, "stages": 2}
"""Two stages: the next tile of keys is loaded while the current one is processed."""


class KernelTiles(NamedTuple):
    """The tiles (queries, positions) of each kernel."""

    fwd: tuple[int, int]
    bwd_dq: tuple[int, int]
    bwd_dkv: tuple[int, int]


TILES = {
    1: KernelTiles((128, 64), (128, 64), (32, 128)),
    2: KernelTiles((64, 64), (64, 64), (64, 32)),
    4: KernelTiles((64, 32), (64, 32), (64, 32)),
    8: KernelTiles((32, 32), (32, 32), (32, 16)),
    16: KernelTiles((32, 32), (16, 32), (32, 16)),
    32: KernelTiles((16, 16), (16, 16), (16, 16)),
}
"""Tile sizes by the register cost of a position (`_tiles`)."""


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"q is {q.dtype}; expected float32, bfloat16 or float16"
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > WIDEST:
            return f"{name} is {x.shape[-1]} wide; expected at most {WIDEST}"
    if k.shape[2] > MOST_KEYS:
        return f"k has {k.shape[2]} keys at a position; expected at most {MOST_KEYS}"
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> Tensor:
    """Arguments and result of `streamed.attend`."""
    exists = key_weights > 0
    # log 0 has no useful gradient, so keys of weight 0 are made invisible instead.
    logs = torch.where(exists, key_weights.clamp(min=torch.finfo(key_weights.dtype).tiny), 1.0).log()
    first, last = (x.to(torch.int32) for x in (spans.first, spans.last))
    return forward(q, k, v, logs.masked_fill(~exists, -torch.inf), first, last, *options)[0]


@torch.library.custom_op("megakernel::weighted_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    first: Tensor,
    last: Tensor,
    similarity: str,
    variances: Sequence[float],
    join: str,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, N, D), and each query's term a of the log weights (B, H, M, N) float32 (see `kernels`)."""
    out, of_queries = _outputs(q, k, v)
    inputs = (q, k, v, log_weights, of_queries, Visible.of(first, last))
    pairs, meta = _pairs(*inputs, similarity, variances, join, _tiles(k, v).fwd)
    grid = (cdiv(q.shape[2], meta.block_q) * q.shape[0] * q.shape[1],)
    launch(kernels.fwd, grid, pairs, out, NORMALIZE=normalize, META=meta, **LAUNCH)
    return out, of_queries


@torch.library.custom_op("megakernel::weighted_attention_backward", mutates_args=())
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    first: Tensor,
    last: Tensor,
    out: Tensor,
    of_queries: Tensor,
    similarity: str,
    variances: Sequence[float],
    join: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log_weights."""
    dq, dk, dv, dlog = _gradients(grad, q, k, v, log_weights)
    delta = q.new_empty(q.shape[:3], dtype=torch.float32)
    do, tiles = Rows.of(grad), _tiles(k, v)
    inputs = (q, k, v, log_weights, of_queries, Visible.of(first, last))
    pairs, meta = _pairs(*inputs, similarity, variances, join, tiles.bwd_dq)
    grid = (cdiv(q.shape[2], meta.block_q) * q.shape[0] * q.shape[1],)
    launch(kernels.bwd_dq, grid, pairs, do, Rows.of(out), delta, dq, NORMALIZE=normalize, META=meta, **LAUNCH)
    block_q, block_kv = tiles.bwd_dkv
    meta = meta._replace(block_q=block_q, block_kv=block_kv)
    pairs = pairs._replace(visible=Visible.of(*_transposed_spans(first, last, v.shape[2])))
    grid = (cdiv(v.shape[2], block_kv) * v.shape[0] * v.shape[1],)
    launch(kernels.bwd_dkv, grid, pairs, do, delta, dk, dv, dlog, META=meta, **LAUNCH)
    return dq, dk, dv, dlog


@forward.register_fake
def _outputs(q, k, v, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, heads, length, v.shape[-1])
    return out, q.new_empty(batch, heads, k.shape[2], length, dtype=torch.float32)


@backward.register_fake
def _gradients(grad, q, k, v, log_weights, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, log_weights))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, similarity, variances, join, normalize = inputs
    ctx.options = (similarity, variances, join, normalize)
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    return (*backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 6)


forward.register_autograd(_differentiate, setup_context=_save)


def _pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_weights: Tensor,
    of_queries: Tensor,
    visible: Visible,
    similarity: str,
    variances: Sequence[float],
    join: str,
    tile: tuple[int, int],
) -> tuple[Pairs, Weighting]:
    """The kernels' arguments, and their compile-time options."""
    root, group = math.sqrt(q.shape[-1]), q.shape[1] // k.shape[1]
    precisions = tuple(1 / (variance * root * math.log(2)) for variance in variances)
    sizes = (group, q.shape[-1], v.shape[-1], *tile)
    meta = Weighting(precisions, similarity == "gaussian", join == "max", *sizes)
    of_keys = log_weights / math.log(2)
    if meta.gaussian:
        # vector_norm sums in float32 without a float32 copy of the keys.
        squares = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).square()
        of_keys = of_keys - squares * of_keys.new_tensor(meta.precisions)[:, None] / 2
    rows = (Rows.of(q), Rows.of(k.flatten(1, 2)), Rows.of(v))
    return Pairs(*rows, of_queries, of_keys, visible, q.shape[2], v.shape[2], k.shape[1]), meta


def _transposed_spans(first: Tensor, last: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The transposed spans: the first and the last query that sees each of `count` keys, (B, S) int32.

    Both ends of the spans increase from query to query, since documents are contiguous.
    """
    keys = torch.arange(count, dtype=torch.int32, device=first.device).repeat(len(first), 1)
    begin = torch.searchsorted(last.contiguous(), keys, out_int32=True)
    return begin, torch.searchsorted(first.contiguous(), keys, right=True, out_int32=True) - 1


def _tiles(k: Tensor, v: Tensor) -> KernelTiles:
    """The largest tiles that fit in registers. The cost of a position is M for rows of 64 elements of 16 bits.

    32-bit elements cost eight times as much: their factors are split in two, and each product is a sum of three.
    """
    width = max(padded(k.shape[-1]), padded(v.shape[-1]))
    cost = k.shape[2] * width // 64 * (8 if k.element_size() == 4 else 1)
    return next((tiles for limit, tiles in TILES.items() if cost <= limit), TILES[32])
