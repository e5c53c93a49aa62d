"""Feature maps phi of similarity `kernel` (docs/formulas.md, 2).

Each map takes x (B, H_kv, C, L, d), L tokens in each of C chunks, and a projection or None.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.projections import Projection, project


class FeatureMap(NamedTuple):
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


def named(feature_map: FeatureMap | str) -> FeatureMap:
    """A `FeatureMap` from one or from its name."""
    return FeatureMap(feature_map) if isinstance(feature_map, str) else feature_map


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


class _Map(NamedTuple):
    phi: Callable[[Tensor, Projection | None], Features]
    projected: bool = False

    exponential: bool = False
    """Whether features are exponentials, so that products of two of them are never exactly 0."""


FEATURE_MAPS = {
    "elu": _Map(_elu, exponential=True),
    "relu": _Map(_relu),
    "identity": _Map(_identity),
    "hedgehog": _Map(_hedgehog, projected=True, exponential=True),
    "favor": _Map(_favor, projected=True, exponential=True),
    "rks": _Map(_rks, projected=True),
    "prf": _Map(_prf, projected=True, exponential=True),
}
"""Name -> map. Projections are omega (M, d), or W (d, d) for hedgehog, or one such matrix per key head."""

SAMPLED = ("favor", "rks", "prf")
"""Maps whose projections are random frequencies."""

UNBOUNDED = ("favor", "prf")
"""Maps whose features have a log scale per token: exponentials, divided by the token's largest one."""
