"""Windowed softmax in linear time on any device."""

import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.chunks import chunk_queries, join_queries
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, position_rows
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.mixture import shifted
from megakernel.ops.sums import normalized
from megakernel.ops.window import Rotary, Tail, cut, rotate_keys, softmax_pairs

GROUP = 4096
"""Tokens whose windows exist at once; the next multiple of a block is taken."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    blocks: int,
    priors: Tensor | None,
    shift: Tensor | None,
    rotary: Rotary | None,
    positions: Positions,
    tail: Tail,
) -> tuple[Tensor, Tail]:
    """Attention (B, H, N, D) and the tail after the last token."""
    varying = None if isinstance(positions, int) else positions[:, None]

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, k, v, at = sequences
        tail, (priors, shift) = Tail(*carry), shared
        heads, length = q.shape[1:3]
        places = positions + start if at is None else at[:, 0]
        layout = cut(places, length, q.device, block_size=block_size, blocks=blocks)
        dtype = accum_dtype(q.dtype)
        queries = q.to(dtype)
        past, keys = (shifted(x.to(dtype), shift) for x in (tail.keys, k))
        if rotary:
            rows = position_rows(places, length, q.device)
            queries = rotary(queries, rows)
            past, keys = rotate_keys(rotary, past, keys, rows)
        chunks, size = layout.places.shape[1:]
        sums = softmax_pairs(
            chunk_queries(queries, k.shape[1], size, chunks),
            layout.windows(past, keys),
            F.pad(layout.windows(tail.values.to(dtype), v.to(dtype)), (0, 1), value=1.0),
            layout.visible(),
            priors,
        )
        return (join_queries(normalized(sums), heads, length).to(v.dtype),), tuple(tail.after(k, v))

    group = block_size * max(1, GROUP // block_size)
    (out,), left = scan_groups(on_group, tuple(tail), (q, k, v, varying), (priors, shift), group=group)
    return out, Tail(*left)
