"""Sums over keys, one per query: the common currency of every normalized attention.

A set of keys gives query i the row sum_j w_ij [v_j, 1]. Rows of disjoint key sets add, whatever made the
weights, and a quotient at the end turns the total into attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """sum_j w_ij [v_j, 1] = values * exp(log_scale); the scale is a constant to autograd."""

    values: Tensor
    """(..., N, D + 1); the last column is the denominator."""

    log_scale: Tensor | None
    """(..., N), `state.EMPTY` where no key contributed; None where `values` are the sums themselves."""

    @property
    def scale_or_zero(self) -> Tensor:
        """(..., N) log scale of every row."""
        return self.values.new_zeros(self.values.shape[:-1]) if self.log_scale is None else self.log_scale


def add(a: Sums, b: Sums) -> Sums:
    """The sums over the keys of `a` and of `b` together."""
    if a.log_scale is None and b.log_scale is None:
        return Sums(a.values + b.values, None)
    logs_a, logs_b = a.scale_or_zero, b.scale_or_zero
    log_scale = torch.maximum(logs_a, logs_b)
    shrink_a = torch.exp(logs_a - log_scale)[..., None]
    shrink_b = torch.exp(logs_b - log_scale)[..., None]
    return Sums(a.values * shrink_a + b.values * shrink_b, log_scale)


def normalized(sums: Sums) -> Tensor:
    """Weighted mean of the values, (..., N, D); 0 where there was nothing to see.

    Weights that add up to less than the smallest normal number are nothing: they have lost their digits, and one over
    them is infinite.
    """
    numerator, denominator = sums.values[..., :-1], sums.values[..., -1:]
    empty = denominator.abs() < torch.finfo(denominator.dtype).tiny
    return numerator * denominator.masked_fill(empty, 1.0).reciprocal().masked_fill(empty, 0.0)


def unnormalized(sums: Sums) -> Tensor:
    """sum_j w_ij v_j itself, (..., N, D)."""
    return sums.values[..., :-1] * torch.exp(sums.scale_or_zero)[..., None]
