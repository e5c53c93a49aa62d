"""FastFood random features: cos and sin, or exp, of S H G Pi H B x, without a dense matrix (KL eq. 6)."""

from torch import Tensor

from megakernel.ops.arguments import check_choice, check_feature_map, check_tokens
from megakernel.ops.dispatch import Implementation, accum_dtype, choose
from megakernel.ops.feature_maps import FEATURE_MAPS, SAMPLED, Features
from megakernel.ops.projections import FastFood, dense


def by_transforms(x: Tensor, projection: FastFood, *, feature_map: str) -> Features:
    """phi of x (B, H_kv, C, L, d) in float32 or better, with fast transforms of whole tensors, on any device."""
    return FEATURE_MAPS[feature_map].phi(x.to(accum_dtype(x.dtype)), projection)


def by_matrix(x: Tensor, projection: FastFood, *, feature_map: str) -> Features:
    """The same with the dense matrix of the transform; the other backends are tested against it."""
    return FEATURE_MAPS[feature_map].phi(x.to(accum_dtype(x.dtype)), dense(projection, x.shape[-1]))


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": by_transforms,
    "reference": by_matrix,
}
"""Backend -> implementation."""


def fastfood_features(
    x: Tensor, projection: FastFood, *, feature_map: str, backend: str | None = None
) -> Features:
    """phi(x) with fast transforms instead of omega.

    `megakernel.ops.phi.features` uses these backends for every FastFood. Fused attention kernels instead use its dense
    matrix, so that features need not be in memory.

    Args:
        x: (B, H_kv, N, d), floating.
        projection: blocks of n = 2^k >= d elements for each key head; M = blocks * d.
        feature_map: rks, prf or favor.
        backend: reference or chunked.

    Returns:
        Values (B, H_kv, N, F) and, for prf and favor, log scales (B, H_kv, N), float32 or better. F is 2 M for rks,
        cosines first, and M for the others.

    Raises:
        ValueError: invalid shapes, dtypes, devices or names; the message names the argument.
    """
    check_tokens("x", x)
    check_choice("feature_map", feature_map, SAMPLED)
    check_feature_map(feature_map, projection, x)
    values, log_scale = choose(IMPLEMENTATIONS, backend)(x[:, :, None], projection, feature_map=feature_map)
    return Features(values[:, :, 0], None if log_scale is None else log_scale[:, :, 0])
