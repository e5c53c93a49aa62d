"""Feature maps phi of similarity `kernel` (docs/formulas.md, 2): what each is, and phi of a layer's queries and keys.

Each map takes x (B, H_kv, C, L, d), L tokens in each of C chunks, and a projection or None.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.projections import Projection, project, rows_of
from megakernel.ops.state import EMPTY, KernelState
from megakernel.ops.tensors import accum_dtype


class Map(NamedTuple):
    """A feature map by name, with options of all maps. Ops also accept a bare name."""

    name: str
    """A key of FEATURE_MAPS."""

    components: int = 1
    """C: the rows of omega are M draws from each of C Gaussians. The kernel is the sum over the Gaussians of means over
    M draws, so features get a factor sqrt(C)."""

    smoothing: float = 0.0
    """A constant feature s: the kernel becomes phi(q).phi(k) + s^2."""


class Features(NamedTuple):
    """phi(x) = values * exp(log_scale)."""

    values: Tensor
    """(B, H_kv, C, L, F)"""

    log_scale: Tensor | None
    """(B, H_kv, C, L), detached, for unbounded maps; None if phi is `values` itself.

    It depends only on the single token: a maximum over tokens would leak later keys into earlier outputs.
    """


def named(feature_map: Map | str) -> Map:
    """A `Map` from one or from its name."""
    return Map(feature_map) if isinstance(feature_map, str) else feature_map


def _scaled(x: Tensor) -> Tensor:
    """x d^-1/4, so that dot products become q.k / sqrt(d)."""
    return x * x.shape[-1] ** -0.25


def _projected(x: Tensor, projection: Projection | None) -> Tensor:
    assert projection is not None
    return project(x, projection)


def _positive(logs: Tensor) -> Features:
    """exp(logs) / sqrt(M)."""
    log_scale = logs.detach().amax(-1)
    return Features(torch.exp(logs - log_scale[..., None]) * logs.shape[-1] ** -0.5, log_scale)


def _elu(x: Tensor, projection: Projection | None) -> Features:
    # elu(x) + 1 would cancel to 0 for large negative x.
    return Features(torch.exp(x.clamp(max=0)) + x.relu(), None)


def _relu(x: Tensor, projection: Projection | None) -> Features:
    return Features(x.relu(), None)


def _identity(x: Tensor, projection: Projection | None) -> Features:
    return Features(x, None)


def _hedgehog(x: Tensor, projection: Projection | None) -> Features:
    y = _projected(x, projection)
    return Features(torch.stack([y, -y], -2).softmax(-1).flatten(-2), None)


def _favor(x: Tensor, projection: Projection | None) -> Features:
    """exp(omega.x - |x|^2 / 2) / sqrt(M)."""
    x = _scaled(x)
    return _positive(_projected(x, projection) - x.square().sum(-1, keepdim=True) / 2)


def _prf(x: Tensor, projection: Projection | None) -> Features:
    """exp(omega.x - |x|^2) / sqrt(M) (KL eq. 9): with the full |x|^2, for a Gaussian kernel."""
    x = _scaled(x)
    return _positive(_projected(x, projection) - x.square().sum(-1, keepdim=True))


def _rks(x: Tensor, projection: Projection | None) -> Features:
    """[cos(omega.x), sin(omega.x)] / sqrt(M) (KL eq. 3)."""
    angles = _projected(_scaled(x), projection)
    return Features(torch.cat([angles.cos(), angles.sin()], -1) * angles.shape[-1] ** -0.5, None)


class Form(NamedTuple):
    """What a feature map is."""

    phi: Callable[[Tensor, Projection | None], Features]

    projected: bool = False
    """Whether it has a projection."""

    sampled: bool = False
    """Whether the rows of its projection are random frequencies: tokens get a factor d^-1/4, features M^-1/2."""

    halves: int = 1
    """2 if features are two halves of M rows each, as cosines and sines; kernels keep them in two tiles."""

    exponential: bool = False
    """Whether features are exponentials, so that products of two of them are never exactly 0."""

    unbounded: bool = False
    """Whether features have a log scale per token: exponentials, divided by the token's largest one."""


FEATURE_MAPS = {
    "elu": Form(_elu, exponential=True),
    "relu": Form(_relu),
    "identity": Form(_identity),
    "hedgehog": Form(_hedgehog, projected=True, halves=2, exponential=True),
    "favor": Form(_favor, projected=True, sampled=True, exponential=True, unbounded=True),
    "rks": Form(_rks, projected=True, sampled=True, halves=2),
    "prf": Form(_prf, projected=True, sampled=True, exponential=True, unbounded=True),
}
"""Name -> map. Projections are omega (M, d), or W (d, d) for hedgehog, or one such matrix per key head."""


class LayerMap(NamedTuple):
    """The feature map of a layer, for queries and (mixture) keys."""

    feature_map: Map | str
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


def features(feature_map: Map | str, x: Tensor, projection: Projection | None) -> Features:
    """phi(x) for x (B, H_kv, C, L, d) in float32 or better."""
    feature_map = named(feature_map)
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
    feature_map: Map | str, k: Tensor, projection: Projection | None, value_dim: int
) -> KernelState:
    """The empty state for keys k (B, H_kv, N, d) and values of width `value_dim`."""
    heads, rows = k.shape[:2], None if projection is None else rows_of(projection, k.shape[-1])
    count, has_scale = _feature_count(feature_map, k.shape[-1], rows)
    sums = k.new_zeros(*heads, count, value_dim + 1, dtype=accum_dtype(k.dtype))
    return KernelState(sums, sums.new_full(heads, EMPTY if has_scale else 0.0))


def check_state(
    state: KernelState,
    feature_map: Map | str,
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


def _feature_count(feature_map: Map | str, width: int, rows: int | None) -> tuple[int, bool]:
    """The number of features of tokens of `width` under a projection to `rows`, and whether they have a log scale."""
    # A compiler sees through the cache anyway, and warns of it.
    count = _count_features if torch.compiler.is_compiling() else _cached_feature_count
    return count(feature_map, width, rows)


def _count_features(feature_map: Map | str, width: int, rows: int | None) -> tuple[int, bool]:
    # Found by applying the map to zero tokens.
    projection = None if rows is None else torch.empty(rows, width, dtype=torch.float64)
    phi = features(feature_map, torch.empty(1, 1, 1, 0, width, dtype=torch.float64), projection)
    return phi.values.shape[-1], phi.log_scale is not None


_cached_feature_count = lru_cache(_count_features)
