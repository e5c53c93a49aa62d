"""The feature map of a layer: phi of queries and of (mixture) keys, and the initial state."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype, choose
from megakernel.ops.fastfood_features import IMPLEMENTATIONS
from megakernel.ops.feature_maps import FEATURE_MAPS, FeatureMap, Features, named
from megakernel.ops.projections import FastFood, Projection, rows_of
from megakernel.ops.state import EMPTY, KernelState


class Phi(NamedTuple):
    """The feature map of a layer, for queries and (mixture) keys."""

    feature_map: FeatureMap | str
    projection: Projection | None
    priors: Tensor | None
    """(H_kv, M) >= 0; None for one key."""

    def of_queries(self, x: Tensor) -> Features:
        """phi of (B, H_kv, C, R, d)."""
        return features(self.feature_map, x, self.projection)

    def of_keys(self, x: Tensor) -> Features:
        """phi of keys (B, H_kv, C, L, d), or with priors sum_r pi_r phi(k_r) of packed keys (B, H_kv, C, L, M d).

        The sum is linear in phi, so the state is as large as with one key (Transformer-MGK, section 2.4).
        """
        if self.priors is None:
            return self.of_queries(x)
        weights = self.priors.to(x.dtype)
        parts = [self.of_queries(part) for part in x.chunk(weights.shape[-1], -1)]
        values = torch.stack([part.values for part in parts])
        shares = weights.T[:, None, :, None, None]
        scales = [part.log_scale for part in parts if part.log_scale is not None]
        if not scales:
            return Features((shares[..., None] * values).sum(0), None)
        # A key of prior 0 must not determine the scale of the others.
        logs = torch.stack(scales).masked_fill(shares == 0, EMPTY)
        largest = logs.amax(0)
        return Features(((shares * torch.exp(logs - largest))[..., None] * values).sum(0), largest)


def features(feature_map: FeatureMap | str, x: Tensor, projection: Projection | None) -> Features:
    """phi(x) for x (B, H_kv, C, L, d) in float32 or better."""
    feature_map = named(feature_map)
    if isinstance(projection, FastFood):
        values, log_scale = choose(IMPLEMENTATIONS, None)(x, projection, feature_map=feature_map.name)
    else:
        values, log_scale = FEATURE_MAPS[feature_map.name].phi(x, projection)
    if feature_map.components > 1:
        values = values * feature_map.components**0.5
    phi = Features(values, log_scale)
    return _smoothed(phi, feature_map.smoothing) if feature_map.smoothing else phi


def _smoothed(phi: Features, constant: float) -> Features:
    """phi with one more feature, the same for every token."""
    values, log_scale = phi
    one = values.new_full((*values.shape[:-1], 1), constant)
    if log_scale is None:
        return Features(torch.cat([values, one], -1), None)
    larger = log_scale.clamp(min=math.log(constant))
    values = values * torch.exp(log_scale - larger)[..., None]
    return Features(torch.cat([values, one * torch.exp(-larger)[..., None]], -1), larger)


def start_state(
    feature_map: FeatureMap | str, k: Tensor, projection: Projection | None, value_dim: int
) -> KernelState:
    """The empty state for keys k (B, H_kv, N, d) and values of width `value_dim`."""
    heads, rows = k.shape[:2], None if projection is None else rows_of(projection, k.shape[-1])
    count, has_scale = _feature_count(feature_map, k.shape[-1], rows)
    sums = k.new_zeros(*heads, count, value_dim + 1, dtype=accum_dtype(k.dtype))
    return KernelState(sums, sums.new_full(heads, EMPTY if has_scale else 0.0))


def check_state(
    state: KernelState,
    feature_map: FeatureMap | str,
    k: Tensor,
    projection: Projection | None,
    value_dim: int,
) -> None:
    """Check that `state` has the shapes of the `start_state` of the other arguments."""
    heads, rows = tuple(k.shape[:2]), None if projection is None else rows_of(projection, k.shape[-1])
    count, _ = _feature_count(feature_map, k.shape[-1], rows)
    expected, shape = (*heads, count, value_dim + 1), tuple(state.sums.shape)
    if shape != expected or tuple(state.log_scale.shape) != heads:
        raise ValueError(
            f"initial_state has sums {shape} and log_scale {tuple(state.log_scale.shape)}; "
            f"expected {expected} and {heads}"
        )


@lru_cache
def _feature_count(feature_map: FeatureMap | str, width: int, rows: int | None) -> tuple[int, bool]:
    """The number of features of tokens of `width` under a projection to `rows`, and whether they have a log scale."""
    # Found by applying the map to zero tokens.
    projection = None if rows is None else torch.empty(rows, width, dtype=torch.float64)
    phi = features(feature_map, torch.empty(1, 1, 1, 0, width, dtype=torch.float64), projection)
    return phi.values.shape[-1], phi.log_scale is not None
