"""Skyformer through three thin matrices, on any device."""

from collections.abc import Callable

import torch
from torch import Tensor

from megakernel.ops.dispatch import wide


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    landmarks: Tensor,
    invert: Callable[[Tensor], Tensor],
    key_mask: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    """(B, H, N, D); k and v with H heads, landmarks (B, H, F), documents (B, N) the number of each token's document."""
    q, k = q.to(wide(q.dtype)), k.to(wide(k.dtype))
    rows = torch.cat([q, k], 2).gather(2, landmarks[..., None].expand(-1, -1, -1, q.shape[3]))
    to_landmarks, between, from_keys = _gaussian(q, rows), _gaussian(rows, rows), _gaussian(rows, k)
    if documents is not None:
        # Landmarks of other documents have weight 0: M falls into blocks, and so does its inverse.
        both = torch.cat([documents, documents], 1)[:, None].expand(-1, q.shape[1], -1)
        owner, token = both.gather(2, landmarks), documents[:, None]
        to_landmarks = to_landmarks.masked_fill(token[..., None] != owner[..., None, :], 0.0)
        between = between.masked_fill(owner[..., None] != owner[..., None, :], 0.0)
        from_keys = from_keys.masked_fill(owner[..., None] != token[..., None, :], 0.0)
    if key_mask is not None:
        from_keys = from_keys.masked_fill(~key_mask[:, None, None], 0.0)
    return (to_landmarks @ (invert(between) @ (from_keys @ v.to(q.dtype)))).to(v.dtype)


def _gaussian(x: Tensor, y: Tensor) -> Tensor:
    """kappa of (..., n, d) and (..., m, d), (..., n, m)."""
    squares = x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :]
    distances = (squares - 2 * x @ y.transpose(-1, -2)).clamp(min=0)
    return torch.exp(-distances / (2 * x.shape[-1] ** 0.5))
