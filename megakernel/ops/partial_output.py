"""Partial outputs: weighted sums over a set of keys, from which every normalized attention is made.

A set of keys gives query i the row sum_j w_ij [v_j, 1]. Rows of disjoint sets of keys add, whatever their weights, and
dividing the total by its last column gives the attention output.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import is_recording
from megakernel.ops.documents import is_graph
from megakernel.ops.feature_maps import FEATURE_MAPS, Map, named
from megakernel.ops.state import EMPTY
from megakernel.ops.tensors import accum_dtype

Finish = Callable[["PartialOutput"], tuple[Tensor, ...]]
"""PartialOutput -> output (..., N, D), and if queries can underflow, (..., N) bool: those that did."""

FinishedOutput = tuple[tuple[Tensor, ...], Any]
"""The result of a `Finish` for all queries, and the outgoing state."""


class PartialOutput(NamedTuple):
    """sum_j w_ij [v_j, 1] = values * exp(log_scale), with a detached scale."""

    values: Tensor
    """(..., N, D + 1); the last column is the denominator."""

    log_scale: Tensor | None
    """(..., N), `state.EMPTY` if no key contributed; None if `values` are the sums themselves."""

    @property
    def scale_or_zero(self) -> Tensor:
        """(..., N) log scale of each query; `EMPTY` for empty sums, which must not determine a maximum."""
        if self.log_scale is not None:
            return self.log_scale
        return self.values.new_full(self.values.shape[:-1], EMPTY).masked_fill(self.values.any(-1), 0.0)


def with_ones(values: Tensor, key_weights: float | Tensor | None = None) -> Tensor:
    """key_weights [v, 1], the terms of a `PartialOutput`."""
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
    """The empty sums of queries q (..., N, d), in float32 or better."""
    values = q.new_zeros(*q.shape[:-1], value_dim + 1, dtype=accum_dtype(q.dtype))
    return PartialOutput(values, values.new_full(values.shape[:-1], EMPTY))


def log_normalizer(sums: PartialOutput) -> Tensor:
    """Log-sum-exp (..., N): log of each query's sum of weights; `EMPTY` if it sees nothing."""
    weights = sums.values[..., -1]
    return sums.scale_or_zero + weights.masked_fill(weights == 0, 1.0).log()


def normalized(sums: PartialOutput) -> Tensor:
    """Weighted mean of the values (..., N, D); 0 for queries that see nothing.

    Sums of weights below the smallest normal number have lost precision and count as nothing.
    """
    return _quotient(sums, torch.finfo(sums.values.dtype).tiny)[0]


def normalized_or_lost(sums: PartialOutput) -> tuple[Tensor, Tensor]:
    """`normalized`, and (..., N) bool: the queries that are 0 because their weights have underflowed.

    A weight is a dot product of features. It can be tiny if no feature is large in both the query and the key; terms
    below the smallest normal number are lost. The limit is the square root of that number: far above the sum of all
    lost terms, and the square of its reciprocal is finite.
    """
    mean, empty = _quotient(sums, torch.finfo(sums.values.dtype).tiny ** 0.5)
    return mean, empty if sums.log_scale is None else empty & (sums.log_scale > EMPTY / 2)


def may_underflow(feature_map: Map | str, normalize: bool) -> bool:
    """Whether queries can underflow: outputs are quotients of exponentials, which may be too small for float32."""
    return normalize and FEATURE_MAPS[named(feature_map).name].exponential


def kernels_check(feature_map: Map | str, normalize: bool, q: Tensor, decays: bool = False) -> bool:
    """Whether an op with kernels looks for underflowed queries and recomputes them.

    On a GPU looking makes the host wait in every layer. So there it is done only for sums that are relative to a
    largest term (exponentials without a bound, decaying states), which lose a query below 1e-19 of it. Other maps lose
    one whose weights add up to less than float32's smallest number, 1e-38; its output is then 0.
    """
    is_relative = decays or FEATURE_MAPS[named(feature_map).name].unbounded
    return may_underflow(feature_map, normalize) and (is_relative or not q.is_cuda)


def finish_for(feature_map: Map | str, normalize: bool) -> Finish:
    """The function that turns sums under a feature map into outputs."""
    if may_underflow(feature_map, normalize):
        return normalized_or_lost
    finish = normalized if normalize else unnormalized
    return lambda sums: (finish(sums),)


def merge_parts(
    near: PartialOutput, far: PartialOutput, share: Tensor | None, finish: Finish
) -> tuple[Tensor, ...]:
    """Merged output of two sets of keys: one normalizer for both, or one each and near weighted by share (..., N)."""
    if share is None:
        return finish(add(near, far))
    far_mean, *lost = finish(far)
    return share[..., None] * normalized(near) + (1 - share[..., None]) * far_mean, *lost


def _quotient(sums: PartialOutput, threshold: float) -> tuple[Tensor, Tensor]:
    """The weighted mean, and (..., N) bool: queries whose weights sum to less than `threshold`, whose mean is 0."""
    empty = sums.values[..., -1].abs() < threshold
    if torch.is_grad_enabled():
        return _Mean.apply(sums.values, empty), empty
    return sums.values[..., :-1] * _reciprocal(sums.values, empty), empty


def _reciprocal(values: Tensor, empty: Tensor) -> Tensor:
    return values[..., -1].masked_fill(empty, torch.inf).reciprocal()[..., None]


class _Mean(torch.autograd.Function):
    """A quotient whose gradient never squares the reciprocal of the denominator, which could overflow."""

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
        dvalues = grad * reciprocal
        return torch.cat([dvalues, -(dvalues * out).sum(-1, keepdim=True)], -1), None


def recompute_lost(finished: tuple[Tensor, ...], recompute: Callable[[], Tensor]) -> Tensor:
    """The output (..., N, D) of a `Finish`, with underflowed queries taken from `recompute`, the same in float64.

    Its smallest number is the eighth power of float32's. Other queries keep their exact bits, so neither later tokens
    nor other sequences change them. For the same reason, the state is never that of `recompute`: what underflows in a
    float32 state is lost to later calls. Compiled and captured graphs and meta tensors cannot check; there, underflowed
    queries are 0. The check synchronizes with the GPU once per call.
    """
    out, *lost = finished
    if not lost or out.dtype == torch.float64 or out.is_meta or is_graph(out):
        return out
    any_lost = lost[0].any()
    if is_recording() or not any_lost:
        return out
    return torch.where(lost[0][..., None], recompute().to(out.dtype), out)


def unnormalized(sums: PartialOutput) -> Tensor:
    """sum_j w_ij v_j, (..., N, D)."""
    values = sums.values[..., :-1]
    return values if sums.log_scale is None else values * torch.exp(sums.log_scale)[..., None]
