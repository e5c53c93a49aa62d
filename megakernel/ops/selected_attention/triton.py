"""Chosen blocks on a GPU: the window by weighted attention's kernels, the blocks by those in `kernels`.

Both have one normalizer: each block that a query reads extends its output and its log-sum-exp, and backward gives both
kinds of kernels the log-sum-exp over all.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import window_reach
from megakernel.ops.kernels.launch import Rows, launch
from megakernel.ops.ring import FollowingGradients, Ring, visits
from megakernel.ops.selected_attention import choice_kernel, chunked, kernels
from megakernel.ops.selected_attention.inputs import SelectedInputs
from megakernel.ops.selected_attention.kernels import Groups, Reads, Sizes
from megakernel.ops.selected_attention.readers import readers_of
from megakernel.ops.selected_attention.tiles import BlockReads, Tiles, choose_for_tiles
from megakernel.ops.weighted_attention import triton as window

LARGEST_BLOCK = 128
"""The largest b: a program holds whole blocks."""

ROWS = {2: 64, 4: 32}
"""Bytes of a number -> rows of a tile of queries."""

LAUNCH = {"warps": 4, "stages": 2}


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: SelectedInputs) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"q is {q.dtype}; expected float32, bfloat16 or float16"
    if not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k is {k.dtype} and v is {v.dtype}; expected one dtype"
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] > window.WIDEST:
            return f"{name} is {x.shape[-1]} wide; expected at most {window.WIDEST}"
    if inputs.selection.block_size > LARGEST_BLOCK:
        return f"blocks have {inputs.selection.block_size} tokens; expected at most {LARGEST_BLOCK}"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: SelectedInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, D) in the dtype of v, and the blocks that the last tile chose, as `SelectedInputs.choice`."""
    length = q.shape[2]
    if length == 1:
        return chunked.attend(q, k, v, inputs)
    tiles = choose_for_tiles(q, inputs, choice_kernel.ON_GPU)
    vectors = chunked.vectors_of(q, k, v, inputs, q.dtype)
    spans = _window_spans(tiles)
    if inputs.ring is None:
        out, _ = forward(*vectors, *spans, *_reads(tiles))
    else:
        out = _InRing.apply(*vectors, *spans, tiles, inputs.ring)
    return out, tiles.last_choice(inputs.choice)


def _window_spans(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The first and the last key of each query's window, (B or 1, N) int32."""
    selection, length = tiles.selection, tiles.layout.length
    positions = tiles.layout.positions.flatten(1)[:, :length]
    last = torch.arange(tiles.cached, tiles.total, device=positions.device).expand_as(positions)
    first = last - window_reach(positions, selection.block_size, selection.near)
    return first.to(torch.int32), last.to(torch.int32)


@torch.library.custom_op("megakernel::selected_attention", mutates_args=())
def forward(
    near_q: Tensor,
    q: Tensor,
    near_k: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    lists: Tensor,
    starts: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, N, D), and the log-sum-exp (B, H, N) float32 of each query's scores, in units of log 2.

    near_q, q: (B, H, N, d), for keys of the window and of chosen blocks. near_k, k: (B, H_kv, T, d); v: (.., T, D).
    first, last: (B or 1, N) int32, keys of the windows. lists: (B, H_kv, N, k') int64, blocks that a query reads, or
    NONE. starts: (B, S) int32, first keys of the blocks.
    """
    near, lse = window_forward(near_q, near_k, v, first, last)
    if not lists.shape[-1]:
        return near, lse
    out = near.float()
    _add_blocks(out, lse, q, k, v, BlockReads(lists, starts, block_size))
    return out.to(v.dtype), lse


@torch.library.custom_op("megakernel::selected_attention_backward", mutates_args=())
def backward(
    grad: Tensor,
    near_q: Tensor,
    q: Tensor,
    near_k: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    lists: Tensor,
    starts: Tensor,
    out: Tensor,
    lse: Tensor,
    block_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of near_q, q, near_k, k and v."""
    dnear_q, dnear_k, dnear_v = window_backward(grad, near_q, near_k, v, first, last, out, lse)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (q, k, v))
    if lists.shape[-1]:
        delta = (out.float() * grad.float()).sum(-1)
        _add_gradients((dq, dk, dv), grad, lse, delta, q, k, v, BlockReads(lists, starts, block_size))
    return dnear_q, dq.to(q.dtype), dnear_k, dk.to(k.dtype), (dnear_v.float() + dv).to(v.dtype)


class _InRing(torch.autograd.Function):
    """`forward` and `backward` of a shard whose queries read the blocks of all shards up to theirs."""

    @staticmethod
    def forward(ctx, near_q, q, near_k, k, v, first, last, tiles, ring):
        near, lse = window_forward(near_q, near_k, v, first, last)
        out = near.float()
        for source, (keys, values) in visits(ring, (k, v)):
            if source <= ring.rank and tiles.own.shape[-1]:
                _add_blocks(out, lse, q, keys, values, _reads(tiles, source, ring))
        out = out.to(v.dtype)
        ctx.save_for_backward(near_q, q, near_k, k, v, first, last, out, lse)
        ctx.tiles, ctx.ring = tiles, ring
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        near_q, q, near_k, k, v, first, last, out, lse = ctx.saved_tensors
        dnear_q, dnear_k, dnear_v = window_backward(grad, near_q, near_k, v, first, last, out, lse)
        delta, dq = (out.float() * grad.float()).sum(-1), q.new_zeros(q.shape, dtype=torch.float32)
        following = FollowingGradients(ctx.ring)
        for source, (keys, values) in visits(ctx.ring, (k, v)):
            dk, dv = (x.new_zeros(x.shape, dtype=torch.float32) for x in (keys, values))
            if source <= ctx.ring.rank and ctx.tiles.own.shape[-1]:
                reads = _reads(ctx.tiles, source, ctx.ring)
                _add_gradients((dq, dk, dv), grad, lse, delta, q, keys, values, reads)
            following.add((dk, dv))
        dk, dv = following.returned()
        dv = (dnear_v.float() + dv).to(v.dtype)
        return dnear_q, dq.to(q.dtype), dnear_k, dk.to(k.dtype), dv, *[None] * 4


def _reads(tiles: Tiles, source: int = 0, ring: Ring | None = None) -> BlockReads:
    """What this shard's queries read in shard `source`; starts int32, as kernels take them."""
    reads = tiles.reads(tiles.layout.length, source, 0 if ring is None else ring.rank)
    return reads._replace(starts=reads.starts.to(torch.int32))


def window_forward(
    near_q: Tensor, near_k: Tensor, v: Tensor, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """`forward` with nothing chosen."""
    out, of_queries = window.forward(
        near_q, near_k[:, :, None], v, _no_weights(near_k), first, last, *SOFTMAX
    )
    return out, of_queries[:, :, 0].neg()


def window_backward(
    grad: Tensor,
    near_q: Tensor,
    near_k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of near_q, near_k and, of what windows read, v; out and lse are over all that is read."""
    inputs = near_q, near_k[:, :, None], v, _no_weights(near_k), first, last
    dnear_q, dnear_k, dv, _ = window.backward(grad, *inputs, out, lse[:, :, None].neg(), *SOFTMAX)
    return dnear_q, dnear_k[:, :, 0], dv


def _add_blocks(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: BlockReads) -> None:
    """Add what queries read of these keys to out (B, H, N, D) float32 and lse, in place."""
    reads, meta, programs = _arguments(q, k, v, blocks, by_place=True)
    # One launch after the other: a query is in one group of each place, and nothing is added to a row twice at once.
    for place in range(blocks.lists.shape[-1]):
        launch(kernels.fwd, (programs,), reads, out, lse, place, META=meta, **LAUNCH)


def _add_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockReads,
) -> None:
    """Add to the queries' gradient, and write those of keys and values, which are zeros; all float32, in place."""
    dq, dk, dv = gradients
    do = Rows.of(grad)
    reads, meta, programs = _arguments(q, k, v, blocks, by_place=True)
    for place in range(blocks.lists.shape[-1]):
        launch(kernels.bwd_dq, (programs,), reads, do, lse, delta, dq, place, META=meta, **LAUNCH)
    reads, meta, _ = _arguments(q, k, v, blocks, by_place=False)
    launch(kernels.bwd_dkv, (len(reads.groups.ends),), reads, do, lse, delta, dk, dv, META=meta, **LAUNCH)


SOFTMAX = ("softmax", (1.0,), "sum", True)
"""Options of weighted attention's kernels."""


def _no_weights(k: Tensor) -> Tensor:
    """Logs of the keys' weights, (B, H_kv, 1, T)."""
    return k.new_zeros(*k.shape[:2], 1, k.shape[2], dtype=torch.float32)


@forward.register_fake
def _outputs(near_q, q, near_k, k, v, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, _ = q.shape
    return v.new_empty(batch, heads, length, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@backward.register_fake
def _gradients(grad, near_q, q, near_k, k, v, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (near_q, q, near_k, k, v))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block_size = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 10
    return (*backward(grad, *ctx.saved_tensors, ctx.block_size), *[None] * 5)


forward.register_autograd(_differentiate, setup_context=_save)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, blocks: BlockReads, by_place: bool
) -> tuple[Reads, Sizes, int]:
    """The arguments of the kernels, their compile-time options, and the most groups of a place of the lists.

    by_place: make the groups of one place of the lists after the other, instead of those of all places together.
    """
    lists, starts, block_size = blocks
    kv_heads, width = k.shape[1], q.shape[-1]
    group, length, count = q.shape[1] // kv_heads, q.shape[2], starts.shape[1]
    size, total = max(1, ROWS[q.element_size()] // group), len(k) * kv_heads * count
    # All places are grouped at once: a launch for each place would cost a host some forty operations.
    sequences = lists.movedim(-1, 0)[..., None].flatten(0, 2) if by_place else lists.flatten(0, 1)
    readers = readers_of(sequences, count, size)
    tokens = torch.where(readers.exists, readers.queries % length, -1)
    ends = readers.ends.to(torch.int32)
    places = F.pad(ends[total - 1 :: total], (1, 0))
    groups = Groups((readers.items % total).to(torch.int32), tokens.to(torch.int32), ends, places, starts)
    meta = Sizes(size, group, block_size, width, v.shape[-1], width**-0.5, width**-0.5 / math.log(2))
    queries = len(k) * kv_heads * length
    reads = Reads(Rows.of(q), Rows.of(k), Rows.of(v), groups, length, k.shape[2], kv_heads, count)
    return reads, meta, min(queries, -(-queries // size) + total)
