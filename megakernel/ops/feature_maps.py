"""Feature maps phi of similarity `kernel` (MECHANISMS section 2).

Each map takes x (B, H_kv, C, L, d), L tokens in each of C chunks, and the projection of its key head, if it
has one.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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


def _project(x: Tensor, projection: Tensor | None) -> Tensor:
    assert projection is not None
    per_head = projection if projection.dim() == 3 else projection[None]
    return x @ per_head.to(x.dtype)[:, None].transpose(-1, -2)


def _elu(x: Tensor, projection: Tensor | None) -> Features:
    # exp(x) below zero, not (exp(x) - 1) + 1: the sum cancels to 0 where |x| is large.
    return Features(torch.exp(x.clamp(max=0)) + x.relu(), None)


def _favor(x: Tensor, projection: Tensor | None) -> Features:
    x = x * x.shape[-1] ** -0.25
    logs = _project(x, projection) - x.square().sum(-1, keepdim=True) / 2
    log_scale = logs.detach().amax(-1)
    return Features(torch.exp(logs - log_scale[..., None]) * logs.shape[-1] ** -0.5, log_scale)


def _hedgehog(x: Tensor, projection: Tensor | None) -> Features:
    y = _project(x, projection)
    return Features(torch.cat([y.softmax(-1), (-y).softmax(-1)], -1), None)


def _relu(x: Tensor, projection: Tensor | None) -> Features:
    return Features(x.relu(), None)


def _identity(x: Tensor, projection: Tensor | None) -> Features:
    return Features(x, None)


class FeatureMap(NamedTuple):
    """A map phi and whether it takes a projection: omega of favor (M, d), W of hedgehog (d, d), or one per key head."""

    phi: Callable[[Tensor, Tensor | None], Features]
    projected: bool = False


FEATURE_MAPS = {
    "elu": FeatureMap(_elu),
    "favor": FeatureMap(_favor, projected=True),
    "hedgehog": FeatureMap(_hedgehog, projected=True),
    "relu": FeatureMap(_relu),
    "identity": FeatureMap(_identity),
}
"""Name -> feature map."""


def features(name: str, x: Tensor, projection: Tensor | None) -> Features:
    """phi(x) for x (B, H_kv, C, L, d) in float32 or better."""
    return FEATURE_MAPS[name].phi(x, projection)
