"""Means of all segments by one matrix product, and no scores between tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Tensor,
    count: int,
    invert: Callable[[Tensor], Tensor],
    key_mask: Tensor | None,
) -> Tensor:
    """Attention (B, H, N, D); arguments as in `nystrom_attention`."""
    group = q.shape[1] // k.shape[1]
    out_dtype, dtype = v.dtype, accum_dtype(q.dtype)
    q = q.to(dtype) * q.shape[-1] ** -0.5
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    real = segments.new_ones(segments.shape).bool() if key_mask is None else key_mask
    # (B, 1, count, N): who belongs to a segment.
    members = ((segments[:, None] == torch.arange(count, device=q.device)[:, None]) & real[:, None])[:, None]
    sizes = members.sum(-1, keepdim=True)
    means = members.to(dtype) / sizes.clamp(min=1)
    mean_q, mean_k = means @ q, means @ k
    exists = (sizes > 0)[..., 0]

    to_landmarks = _softmax(q, mean_k, exists)
    between = _softmax(mean_q, mean_k, exists)
    # A landmark that does not exist is its own inverse and reaches nobody.
    missing = torch.diag_embed((~exists).to(dtype))
    between = between * exists[..., None] + missing
    from_keys = _softmax(mean_q, k, real[:, None]) * exists[..., None]
    return (to_landmarks @ (invert(between) @ (from_keys @ v))).to(out_dtype)


def _softmax(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Row-normalized exp(q.k), over keys that exist; visible (B, 1, m). Rows that see none are 0."""
    scores = (q @ k.transpose(-1, -2)).masked_fill(~visible[..., None, :], torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~visible[..., None, :], 0.0)
