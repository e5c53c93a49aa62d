"""EVA's control variates, and attention over windows and chunk summaries where tokens see both ways."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import choose
from megakernel.ops.eva_attention import chunked, reference
from megakernel.ops.eva_attention.chunked import Chunks, Windows

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""

__all__ = ["Chunks", "Windows", "control_variates", "eva_attention"]


def control_variates(omega: Tensor, keys: Tensor, values: Tensor, real: Tensor | None = None) -> Tensor:
    """beta_c = sum_j softmax_j(omega_c.k_j / sqrt(d) - |k_j|^2 / (2 sqrt(d))) v_j over the keys of each chunk.

    omega: (B, H, S, d); keys: (B, H, S, s, d); values: (B, H, S, s, D); real: (B or 1, S, s) bool, which keys exist.
    Returns (B, H, S, D), 0 for a chunk without keys.
    """
    scores = (keys @ omega[..., None])[..., 0] - keys.square().sum(-1) / 2
    scores = scores * keys.shape[-1] ** -0.5
    if real is None:
        return (scores.softmax(-1)[..., None, :] @ values)[..., 0, :]
    weights = scores.masked_fill(~real[:, None], torch.finfo(scores.dtype).min).softmax(-1)
    return (weights.masked_fill(~real[:, None], 0.0)[..., None, :] @ values)[..., 0, :]


def eva_attention(q: Tensor, windows: Windows, chunks: Chunks, *, backend: str | None = None) -> Tensor:
    """One softmax over the keys of a query's window, weights exp(q.k / sqrt(d)), and over chunks, exp(q.k_c / sqrt(d)).

    Args:
        q: (B, H, N, d); window m holds queries m w .. (m + 1) w - 1.
        windows: M = ceil(N / w) windows of keys and values.
        chunks: summaries of all chunks of the row.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of q; 0 where nothing exists.
    """
    return choose(IMPLEMENTATIONS, backend)(q, windows, chunks)
