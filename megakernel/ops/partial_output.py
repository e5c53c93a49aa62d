"""Sums over keys, one per query: the common currency of every normalized attention.

A set of keys gives query i the row sum_j w_ij [v_j, 1]. Rows of disjoint key sets add, whatever made the
weights, and a quotient at the end turns the total into attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype, is_noting
from megakernel.ops.documents import is_graph
from megakernel.ops.feature_maps import FEATURE_MAPS, FeatureMap, named
from megakernel.ops.state import EMPTY

Finish = Callable[["PartialOutput"], tuple[Tensor, ...]]
"""PartialOutput -> output (..., N, D), and where they can get lost (..., N) bool, which queries did."""


class PartialOutput(NamedTuple):
    """sum_j w_ij [v_j, 1] = values * exp(log_scale); the scale is a constant to autograd."""

    values: Tensor
    """(..., N, D + 1); the last column is the denominator."""

    log_scale: Tensor | None
    """(..., N), `state.EMPTY` where no key contributed; None where `values` are the sums themselves."""

    @property
    def scale_or_zero(self) -> Tensor:
        """(..., N) log scale of every query, `EMPTY` where nothing is summed: it must not set a maximum."""
        if self.log_scale is not None:
            return self.log_scale
        return self.values.new_full(self.values.shape[:-1], EMPTY).masked_fill(self.values.any(-1), 0.0)


def with_ones(values: Tensor, key_weights: float | Tensor | None = None) -> Tensor:
    """key_weights [v, 1], which sums are made of."""
    ones = F.pad(values, (0, 1), value=1.0)
    return ones if key_weights is None else ones * key_weights


def add(a: PartialOutput, b: PartialOutput) -> PartialOutput:
    """The sums over the keys of `a` and of `b` together."""
    if a.log_scale is None and b.log_scale is None:
        return PartialOutput(a.values + b.values, None)
    logs_a, logs_b = a.scale_or_zero, b.scale_or_zero
    log_scale = torch.maximum(logs_a, logs_b)
    shrink_a = torch.exp(logs_a - log_scale)[..., None]
    shrink_b = torch.exp(logs_b - log_scale)[..., None]
    return PartialOutput(a.values * shrink_a + b.values * shrink_b, log_scale)


def empty_partial_output(q: Tensor, value_dim: int) -> PartialOutput:
    """The sums over no keys of queries q (..., N, d), in float32 or better."""
    values = q.new_zeros(*q.shape[:-1], value_dim + 1, dtype=accum_dtype(q.dtype))
    return PartialOutput(values, values.new_full(values.shape[:-1], EMPTY))


def log_normalizer(sums: PartialOutput) -> Tensor:
    """Logarithm of each query's sum of weights, (..., N); `EMPTY` where it saw nothing."""
    weights = sums.values[..., -1]
    return sums.scale_or_zero + weights.masked_fill(weights == 0, 1.0).log()


def normalized(sums: PartialOutput) -> Tensor:
    """Weighted mean of the values, (..., N, D); 0 where there was nothing to see.

    Weights that add up to less than the smallest normal number are nothing: they have lost their digits.
    """
    return _quotient(sums, torch.finfo(sums.values.dtype).tiny)[0]


def normalized_or_lost(sums: PartialOutput) -> tuple[Tensor, Tensor]:
    """`normalized`, and (..., N) bool: the queries that are 0 because their weights have lost digits.

    A weight is a product over features, which can be small wherever a query and a key agree in no feature that is
    large for either, though both have features of size 1. Terms below the smallest normal number are lost. Their square
    root is far above all of them together, and one over it has a square.
    """
    found, empty = _quotient(sums, torch.finfo(sums.values.dtype).tiny ** 0.5)
    return found, empty if sums.log_scale is None else empty & (sums.log_scale > EMPTY / 2)


def may_lose(feature_map: FeatureMap | str, normalize: bool) -> bool:
    """Whether queries can get lost: quotients of exponentials, which may be too small for float32."""
    return normalize and FEATURE_MAPS[named(feature_map).name].exponential


def finish_of(feature_map: FeatureMap | str, normalize: bool) -> Finish:
    """How sums under a feature map become outputs."""
    if may_lose(feature_map, normalize):
        return normalized_or_lost
    finish = normalized if normalize else unnormalized
    return lambda sums: (finish(sums),)


def merge_parts(
    near: PartialOutput, far: PartialOutput, share: Tensor | None, finish: Finish
) -> tuple[Tensor, ...]:
    """What two sets of keys give together: under one normalizer, or with share (..., N) of near each under its own."""
    if share is None:
        return finish(add(near, far))
    seen, *lost = finish(far)
    return share[..., None] * normalized(near) + (1 - share[..., None]) * seen, *lost


def _quotient(sums: PartialOutput, least: float) -> tuple[Tensor, Tensor]:
    """The mean, and where weights add up to less than `least`, which gives 0."""
    empty = sums.values[..., -1].abs() < least
    if torch.is_grad_enabled():
        return _Mean.apply(sums.values, empty), empty
    return sums.values[..., :-1] * _reciprocal(sums.values, empty), empty


def _reciprocal(values: Tensor, empty: Tensor) -> Tensor:
    return values[..., -1].masked_fill(empty, torch.inf).reciprocal()[..., None]


class _Mean(torch.autograd.Function):
    """A quotient whose gradient has one over the denominator once: its square, as a reciprocal's, would overflow."""

    @staticmethod
    def forward(ctx, values, empty):
        reciprocal = _reciprocal(values, empty)
        out = values[..., :-1] * reciprocal
        ctx.save_for_backward(out, reciprocal)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        out, reciprocal = ctx.saved_tensors
        slope = grad * reciprocal
        return torch.cat([slope, -(slope * out).sum(-1, keepdim=True)], -1), None


Found = tuple[tuple[Tensor, ...], Any]
"""What a `Finish` gave for all queries, and what they leave behind."""


def in_range(found: Found, again: Callable[[], Found]) -> tuple[Tensor, Any]:
    """The output (..., N, D) and what is left behind, of `again` where queries are lost: the same in float64.

    Its smallest number is the eighth power of float32's. Queries that are not lost keep their bits, whatever later
    tokens did to others. A compiled or captured graph and tensors without numbers cannot look; there, lost queries are
    0. Looking makes the host wait for a GPU, once a call.
    """
    (out, *lost), left = found
    if not lost or out.dtype == torch.float64 or out.is_meta or is_graph(out):
        return out, left
    found_any = lost[0].any()
    if is_noting() or not found_any:
        return out, left
    (exact_out, *_), left = again()
    return torch.where(lost[0][..., None], exact_out.to(out.dtype), out), left


def unnormalized(sums: PartialOutput) -> Tensor:
    """sum_j w_ij v_j itself, (..., N, D)."""
    values = sums.values[..., :-1]
    return values if sums.log_scale is None else values * torch.exp(sums.log_scale)[..., None]
