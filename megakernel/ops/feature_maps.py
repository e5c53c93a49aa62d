"""Feature maps phi of similarity `kernel` (docs/formulas.md, 2).

Each map takes x (B, H_kv, C, L, d), L tokens in each of C chunks, and the projection of its key head, if it
has one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.projections import Projection, project


class FeatureMap(NamedTuple):
    """Which phi: a map by name, and what holds for any map. A bare name stands for the map without options."""

    name: str
    """A key of FEATURE_MAPS."""

    components: int = 1
    """C > 1: the rows of omega are M draws of each of C Gaussians, and the kernel is the sum over the Gaussians of
    their means over M; rows alone would give the mean over both."""

    smoothing: float = 0.0
    """A constant feature s: the kernel becomes phi(q).phi(k) + s^2."""


class Features(NamedTuple):
    """phi(x) = values * exp(log_scale)."""

    values: Tensor
    """(B, H_kv, C, L, F)"""

    log_scale: Tensor | None
    """(B, H_kv, C, L), a constant to autograd, for maps without an upper bound; None where phi is `values`
    itself.

    It depends on the single token only: a maximum over other tokens would let later keys reach earlier
    outputs.
    """


def named(feature_map: FeatureMap | str) -> FeatureMap:
    """The map with its options."""
    return FeatureMap(feature_map) if isinstance(feature_map, str) else feature_map


def _scaled(x: Tensor) -> Tensor:
    """x d^-1/4: a product of two such vectors is q.k / sqrt(d)."""
    return x * x.shape[-1] ** -0.25


def _projected(x: Tensor, projection: Projection | None) -> Tensor:
    assert projection is not None
    return project(x, projection)


def _positive(logs: Tensor) -> Features:
    """exp(logs) / sqrt(M)."""
    log_scale = logs.detach().amax(-1)
    return Features(torch.exp(logs - log_scale[..., None]) * logs.shape[-1] ** -0.5, log_scale)


def _elu(x: Tensor, projection: Projection | None) -> Features:
    # exp(x) below zero, not (exp(x) - 1) + 1: the sum cancels to 0 where |x| is large.
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
    """exp(omega.x - |x|^2) / sqrt(M) (KL eq. 9): the whole square, for a Gaussian kernel."""
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
    """Whether features are exponentials, so that no product of two of them is 0."""


FEATURE_MAPS = {
    "elu": _Map(_elu, exponential=True),
    "relu": _Map(_relu),
    "identity": _Map(_identity),
    "hedgehog": _Map(_hedgehog, projected=True, exponential=True),
    "favor": _Map(_favor, projected=True, exponential=True),
    "rks": _Map(_rks, projected=True),
    "prf": _Map(_prf, projected=True, exponential=True),
}
"""Name -> phi and what is known of it. A projection is omega (M, d), or W (d, d) of hedgehog, or one per key head."""

SAMPLED = ("favor", "rks", "prf")
"""The maps whose projections are random frequencies."""
