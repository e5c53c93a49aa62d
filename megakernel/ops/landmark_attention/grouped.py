"""Windows in linear time; landmarks for some queries at a time, so that memory stays bounded."""

import torch
from torch import Tensor

from megakernel.ops.chunks import chunk_queries, join_queries
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, position_rows
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.landmark_attention.form import Landmarks, Near, Sight, with_ones
from megakernel.ops.mixture import shifted
from megakernel.ops.sums import Sums, add, normalized
from megakernel.ops.window import Tail, cut, rotate_keys, softmax_pairs

GROUP = 1024
"""Queries whose weights of landmarks exist at once; the next multiple of a block is taken."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    sight: Sight,
    *,
    near: Near,
    tail: Tail,
    mass: float,
    priors: Tensor | None,
    shift: Tensor | None,
    far_weight: Tensor | None,
    gate: Tensor | None,
    positions: Positions,
) -> Tensor:
    """Attention (B, H, N, D)."""
    varying = None if isinstance(positions, int) else positions[:, None]
    rank, ends = landmarks.keys.shape[3], landmarks.ends

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, k, v, gate, first, limit, at = sequences
        keys, values, far_weight, priors, shift = shared
        tail, heads, length, kv_heads = Tail(*carry), q.shape[1], q.shape[2], k.shape[1]
        places = positions + start if at is None else at[:, 0]
        window = _window(q, k, v, tail, places, near, priors, shift)
        far_q = q.to(accum_dtype(q.dtype))
        if near.far_rotary:
            far_q = near.far_rotary(far_q, position_rows(places, length, q.device))
        queries = chunk_queries(far_q, kv_heads, length)
        visible = Sight(first[:, 0], limit[:, 0]).visible(ends, rank)[:, None]
        far = softmax_pairs(queries, keys, values, visible, priors)
        far = Sums(join_queries(far.values, heads, length), _rows(far, heads, length))
        if far_weight is not None:
            far = far._replace(values=far.values * torch.exp(far_weight)[:, None, None])
        out = _join(window, far, gate, visible.any(-1))
        return (out.to(v.dtype),), tuple(tail.after(k, v))

    dtype = accum_dtype(q.dtype)
    keys = landmarks.keys.to(dtype).flatten(2, 3)[:, :, None]
    values = with_ones(landmarks.values.to(dtype).flatten(2, 3), mass)[:, :, None]
    wide_weight = None if far_weight is None else far_weight.to(dtype)
    sequences = (q, k, v, gate, sight.first[:, None], sight.limit[:, None], varying)
    group = near.block_size * max(1, GROUP // near.block_size)
    shared = (keys, values, wide_weight, priors, shift)
    (out,), _ = scan_groups(on_group, tuple(tail), sequences, shared, group=group)
    return out


def _window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tail: Tail,
    places: Positions,
    near: Near,
    priors: Tensor | None,
    shift: Tensor | None,
) -> Sums:
    """Sums (B, H, N, D + 1) over the window."""
    heads, length, dtype = q.shape[1], q.shape[2], accum_dtype(q.dtype)
    layout = cut(places, length, q.device, block_size=near.block_size, blocks=near.blocks)
    queries = q.to(dtype)
    past, keys = (shifted(x.to(dtype), shift) for x in (tail.keys, k))
    if near.rotary:
        rows = position_rows(places, length, q.device)
        queries = near.rotary(queries, rows)
        past, keys = rotate_keys(near.rotary, past, keys, rows)
    chunks, size = layout.places.shape[1:]
    sums = softmax_pairs(
        chunk_queries(queries, k.shape[1], size, chunks),
        layout.windows(past, keys),
        with_ones(layout.windows(tail.values.to(dtype), v.to(dtype))),
        layout.visible(),
        priors,
    )
    return Sums(join_queries(sums.values, heads, length), _rows(sums, heads, length))


def _rows(sums: Sums, heads: int, length: int) -> Tensor:
    return join_queries(sums.scale_or_zero[..., None], heads, length)[..., 0]


def _join(near: Sums, far: Sums, gate: Tensor | None, sees_far: Tensor) -> Tensor:
    if gate is None:
        return normalized(add(near, far))
    # Without a landmark in sight the window alone, exactly.
    share = torch.where(sees_far, torch.sigmoid(gate.to(near.values.dtype)), 1.0)[..., None]
    return share * normalized(near) + (1 - share) * normalized(far)
