"""Windows in linear time; landmarks for some queries at a time, so that memory stays bounded."""

import torch
from torch import Tensor

from megakernel.ops.chunks import chunk_queries
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, position_rows
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.landmark_attention.form import Landmarks, Sight
from megakernel.ops.sums import join, normalized, with_ones
from megakernel.ops.window import Tail, Window, rows_of_queries, softmax_pairs, window_sums

GROUP = 1024
"""Queries whose weights of landmarks exist at once; the next multiple of a block is taken."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    landmarks: Landmarks,
    sight: Sight,
    *,
    window: Window,
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
        near = window_sums(q, k, v, tail, places, window, priors, shift)
        far_q = q.to(accum_dtype(q.dtype))
        if window.far_rotary:
            far_q = window.far_rotary(far_q, position_rows(places, length, q.device))
        queries = chunk_queries(far_q, kv_heads, length)
        visible = Sight(first[:, 0], limit[:, 0]).visible(ends, rank)[:, None]
        far = rows_of_queries(softmax_pairs(queries, keys, values, visible, priors), heads, length)
        if far_weight is not None:
            far = far._replace(values=far.values * torch.exp(far_weight)[:, None, None])
        share = None
        if gate is not None:
            # Without a landmark in sight the window alone, exactly.
            share = torch.where(visible.any(-1), torch.sigmoid(gate.to(near.values.dtype)), 1.0)
        (out,) = join(near, far, share, lambda sums: (normalized(sums),))
        return (out.to(v.dtype),), tuple(tail.after(k, v))

    dtype = accum_dtype(q.dtype)
    keys = landmarks.keys.to(dtype).flatten(2, 3)[:, :, None]
    values = with_ones(landmarks.values.to(dtype).flatten(2, 3), mass)[:, :, None]
    wide_weight = None if far_weight is None else far_weight.to(dtype)
    sequences = (q, k, v, gate, sight.first[:, None], sight.limit[:, None], varying)
    group = window.block_size * max(1, GROUP // window.block_size)
    shared = (keys, values, wide_weight, priors, shift)
    (out,), _ = scan_groups(on_group, tuple(tail), sequences, shared, group=group)
    return out
