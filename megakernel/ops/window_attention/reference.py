"""Windowed softmax from its formula, query by query."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, position_rows
from megakernel.ops.mixture import by_component, shifted
from megakernel.ops.window import Rotary, Tail, rotate_keys


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
    """Arguments and results of `chunked.attend`."""
    group, dtype = q.shape[1] // k.shape[1], accum_dtype(q.dtype)
    rows = position_rows(positions, q.shape[2], q.device)
    queries = q.to(dtype)
    past, keys = (shifted(x.to(dtype), shift) for x in (tail.keys, k))
    if rotary:
        queries = rotary(queries, rows)
        past, keys = rotate_keys(rotary, past, keys, rows)
    keys = torch.cat([past, keys], 2).repeat_interleave(group, 1)
    components, shares = by_component(keys, priors, q.shape[-1])
    values = torch.cat([tail.values, v], 2).to(dtype).repeat_interleave(group, 1)
    before = past.shape[2]
    outputs = []
    for row, places in enumerate(rows.expand(q.shape[0], -1).tolist()):
        for i, position in enumerate(places):
            block = position // block_size
            oldest = max(0, (block - blocks + 1) * block_size)
            window = slice(before + i - (position - oldest), before + i + 1)
            scores = components[:, row, :, window] @ queries[row, :, i, :, None] * q.shape[-1] ** -0.5
            # Dividing all weights of a row by one number changes no quotient.
            largest = scores.detach().amax((0, 2), keepdim=True)
            weights = (shares * torch.exp(scores - largest)).sum(0)
            outputs.append((weights / weights.sum(1, keepdim=True) * values[row, :, window]).sum(1))
    out = torch.stack(outputs).view(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return out.to(v.dtype), tail.after(k, v)
