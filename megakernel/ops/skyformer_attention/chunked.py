"""Skyformer through three thin matrices, on any device."""

from collections.abc import Callable

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    landmarks: Tensor,
    invert: Callable[[Tensor], Tensor],
    key_mask: Tensor | None,
) -> Tensor:
    """(B, H, N, D); k and v with H heads, landmarks (B, H, F)."""
    q, k = q.to(accum_dtype(q.dtype)), k.to(accum_dtype(k.dtype))
    rows = torch.cat([q, k], 2).gather(2, landmarks[..., None].expand(-1, -1, -1, q.shape[3]))
    to_landmarks, between, from_keys = _gaussian(q, rows), _gaussian(rows, rows), _gaussian(rows, k)
    if key_mask is not None:
        from_keys = from_keys.masked_fill(~key_mask[:, None, None], 0.0)
    return (to_landmarks @ (invert(between) @ (from_keys @ v.to(q.dtype)))).to(v.dtype)


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    """kappa of (..., n, d) and (..., m, d), (..., n, m)."""
    squares = x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :]
    distances = (squares - 2 * x @ y.transpose(-1, -2)).clamp(min=0)
    return torch.exp(-distances / (2 * x.shape[-1] ** 0.5))
