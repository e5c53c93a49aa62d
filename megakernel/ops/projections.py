"""Linear projections of tokens: in feature maps a matrix per key head or Fastfood's structured product, and logits."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.hadamard import hadamard, hadamard_matrix


class FastFood(NamedTuple):
    """Blocks of S H G Pi H B / sqrt(n), H the Walsh-Hadamard matrix of n = 2^k >= d (KL eq. 6, with sigma 1).

    Tokens are zero-padded from d to n; each block gives the first d of its n rows.
    """

    scales: Tensor
    """S, (H_kv, blocks, n)."""

    gaussians: Tensor
    """G, (H_kv, blocks, n)."""

    signs: Tensor
    """B, (H_kv, blocks, n)."""

    permutation: Tensor
    """(H_kv, blocks, n) int64: component i of Pi x is component permutation[i] of x."""


Projection = Tensor | FastFood
"""A matrix (M, d), one per key head (H_kv, M, d), or Fastfood's structured product."""


def padded_width(width: int) -> int:
    """n, the power of two that tokens of `width` are padded to for a Hadamard transform."""
    return 1 << (width - 1).bit_length()


def project(x: Tensor, projection: Projection) -> Tensor:
    """x (B, H_kv, C, L, d) projected to (B, H_kv, C, L, M)."""
    if isinstance(projection, FastFood):
        return _transform(x, projection)
    per_head = projection if projection.dim() == 3 else projection[None]
    return x @ per_head.to(x.dtype)[:, None].transpose(-1, -2)


def _transform(x: Tensor, projection: FastFood) -> Tensor:
    width, size = x.shape[-1], projection.scales.shape[-1]
    scales, gaussians, signs, permutation = (part[:, None, None] for part in projection)
    y = F.pad(x, (0, size - width))[..., None, :]
    y = hadamard(y * signs.to(x.dtype))
    y = y.gather(-1, permutation.expand(y.shape))
    y = hadamard(y * gaussians.to(x.dtype)) * (scales * size**-0.5).to(x.dtype)
    return y[..., :width].flatten(-2)


def rows_of(projection: Projection | None, width: int) -> int:
    """M of a projection of vectors of `width` d; d without a projection."""
    if projection is None:
        return width
    return projection.scales.shape[1] * width if isinstance(projection, FastFood) else projection.shape[-2]


def dense(projection: Projection | None, width: int) -> Tensor | None:
    """A projection of vectors of `width` d as a matrix (M, d) or (H_kv, M, d), from its formula."""
    if not isinstance(projection, FastFood):
        return projection
    scales, gaussians, signs, permutation = projection
    size = scales.shape[-1]
    h = hadamard_matrix(size, scales)
    pi = F.one_hot(permutation, size).to(scales.dtype)
    matrix = scales[..., None] * (h @ (gaussians[..., None] * (pi @ (h * signs[..., None, :])))) * size**-0.5
    return matrix[..., :width, :width].flatten(1, 2)


def logits_per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x.w of each head: (B, H, N) in the dtype of x, for x (B, H, N, d) and weight (H, d)."""
    return (x @ weight[..., None].to(x.dtype))[..., 0]
