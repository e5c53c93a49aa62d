"""Skyformer from its equations 4 to 6: the matrix of all queries and keys, and a matrix that samples its rows."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
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
    """Arguments and result of `chunked.attend`."""
    length = q.shape[2]
    x = torch.cat([q, k], 2).to(accum_dtype(q.dtype))
    lifted = torch.exp(-(x[..., :, None, :] - x[..., None, :, :]).square().sum(-1) / (2 * q.shape[-1] ** 0.5))
    sampling = F.one_hot(landmarks, 2 * length).to(x.dtype).transpose(-1, -2)
    approximation = (
        lifted
        @ sampling
        @ invert(sampling.transpose(-1, -2) @ lifted @ sampling)
        @ sampling.transpose(-1, -2)
        @ lifted
    )
    scores = approximation[..., :length, length:]
    if key_mask is not None:
        scores = scores * key_mask[:, None, None]
    return (scores @ v.to(x.dtype)).to(v.dtype)
