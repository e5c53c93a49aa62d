"""Skyformer: kernelized attention through landmarks sampled from queries and keys (docs/formulas.md, 5)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_heads, expand
from megakernel.ops.dispatch import choose
from megakernel.ops.tensors import accum_dtype
from megakernel.papers.skyformer.pseudo_inverse import Invert, regularized_inverse


def skyformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    landmarks: Tensor,
    invert: Invert = regularized_inverse,
    key_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """kappa(Q, L) M^+ kappa(L, K) V with kappa(x, y) = exp(-|x - y|^2 / 2 sqrt(d)) and M = kappa(L, L) (eqs. 5, 6).

    Linear in the number of tokens; not normalized and not causal.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        landmarks: int64 indices of rows of [Q; K], 0 .. 2N - 1, broadcastable to (B, H, F).
        invert: M (B, H, F, F) -> its inverse.
        key_mask: (B, N) bool, False removes a key; landmarks must be rows of real tokens.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v.

    Raises:
        ValueError: invalid shapes or dtypes; the message names the argument.
    """
    check_heads(q, k, v)
    rows = expand("landmarks", landmarks, (*q.shape[:2], landmarks.shape[-1]))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return choose(IMPLEMENTATIONS, backend)(q, k, v, rows, invert, key_mask)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, invert: Invert, key_mask: Tensor | None
) -> Tensor:
    """Linear time, with three thin matrices; k and v have H heads, landmarks (B, H, F)."""
    q, k = q.to(accum_dtype(q.dtype)), k.to(accum_dtype(k.dtype))
    rows = torch.cat([q, k], 2).gather(2, landmarks[..., None].expand(-1, -1, -1, q.shape[3]))
    to_landmarks, between, from_keys = gaussian(q, rows), gaussian(rows, rows), gaussian(rows, k)
    if key_mask is not None:
        from_keys = from_keys.masked_fill(~key_mask[:, None, None], 0.0)
    return (to_landmarks @ (invert(between) @ (from_keys @ v.to(q.dtype)))).to(v.dtype)


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """kappa(x, y) (..., n, m) of x (..., n, d) and y (..., m, d)."""
    squares = x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :]
    distances = (squares - 2 * x @ y.transpose(-1, -2)).clamp(min=0)
    return torch.exp(-distances / (2 * x.shape[-1] ** 0.5))


def reference(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, invert: Invert, key_mask: Tensor | None
) -> Tensor:
    """From equations 4 to 6, with the matrix of all queries and keys and a sampling matrix."""
    length = q.shape[2]
    x = torch.cat([q, k], 2).to(accum_dtype(q.dtype))
    lifted = torch.exp(-(x[..., :, None, :] - x[..., None, :, :]).square().sum(-1) / (2 * q.shape[-1] ** 0.5))
    sampling = F.one_hot(landmarks, 2 * length).to(x.dtype).transpose(-1, -2)
    inverse = invert(sampling.transpose(-1, -2) @ lifted @ sampling)
    approximation = lifted @ sampling @ inverse @ sampling.transpose(-1, -2) @ lifted
    scores = approximation[..., :length, length:]
    if key_mask is not None:
        scores = scores * key_mask[:, None, None]
    return (scores @ v.to(x.dtype)).to(v.dtype)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
