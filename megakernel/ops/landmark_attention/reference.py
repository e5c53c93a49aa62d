"""The same from its formula, query by query."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, position_rows
from megakernel.ops.landmark_attention.form import Landmarks, Sight
from megakernel.ops.mixture import by_component, shifted
from megakernel.ops.window import Tail, Window, rotate_keys


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
    """Arguments and result of `chunked.attend`."""
    batch, heads, length, width = q.shape
    group, dtype, rank = heads // k.shape[1], accum_dtype(q.dtype), landmarks.keys.shape[3]
    rows = position_rows(positions, length, q.device)
    far_q = q.to(dtype)
    past, keys = (shifted(x.to(dtype), shift) for x in (tail.keys, k))
    near_q = far_q
    if window.rotary:
        near_q = window.rotary(near_q, rows)
        past, keys = rotate_keys(window.rotary, past, keys, rows)
    if window.far_rotary:
        far_q = window.far_rotary(far_q, rows)
    keys = torch.cat([past, keys], 2).repeat_interleave(group, 1)
    values = torch.cat([tail.values, v], 2).to(dtype).repeat_interleave(group, 1)
    far_keys, far_values = (x.to(dtype).repeat_interleave(group, 1).flatten(2, 3) for x in landmarks[:2])
    keys, shares = by_component(keys, priors, width)
    far_keys, _ = by_component(far_keys, priors, width)
    ends = landmarks.ends.expand(batch, -1).tolist()
    first, limit = (x.expand(batch, -1).tolist() for x in sight)
    log_mass = torch.log(torch.tensor(mass, dtype=dtype)) + (
        0.0 if far_weight is None else far_weight[:, None, None]
    )

    outputs = []
    for row, places in enumerate(rows.expand(batch, -1).tolist()):
        for i, position in enumerate(places):
            oldest = max(0, (position // window.block_size - window.blocks + 1) * window.block_size)
            here = past.shape[2] + i
            seen_tokens = slice(here - (position - oldest), here + 1)
            scores = keys[:, row, :, seen_tokens] @ near_q[row, :, i, :, None] * width**-0.5
            seen = [s for s, end in enumerate(ends[row]) if first[row][i] <= end < limit[row][i]]
            at = [s * rank + place for s in seen for place in range(rank)]
            far_scores = far_keys[:, row][:, :, at] @ far_q[row, :, i, :, None] * width**-0.5 + log_mass
            # Dividing all weights of a row by one number changes no quotient.
            largest = torch.cat([scores, far_scores], 2).detach().amax((0, 2), keepdim=True)
            own, other = ((shares * torch.exp(x - largest)).sum(0) for x in (scores, far_scores))
            share = None if gate is None or not seen else torch.sigmoid(gate[row, :, i, None].to(dtype))
            outputs.append(_mean(own, other, values[row, :, seen_tokens], far_values[row][:, at], share))
    out = torch.stack(outputs).view(batch, length, heads, -1).transpose(1, 2)
    return out.to(v.dtype)


def _mean(near: Tensor, far: Tensor, values: Tensor, far_values: Tensor, share: Tensor | None) -> Tensor:
    """(H, D) of weights (H, W, 1) and values (H, W, D) of tokens, and the same of landmarks."""
    sums = [((weights * of).sum(1), weights.sum(1)) for weights, of in ((near, values), (far, far_values))]
    if share is None:
        return (sums[0][0] + sums[1][0]) / (sums[0][1] + sums[1][1])
    return share * sums[0][0] / sums[0][1] + (1 - share) * sums[1][0] / sums[1][1]
