"""Sums over keys weighed by phi(q).phi(k): of the tokens of a chunk, and of a state of all earlier ones."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .features import Features
from .layers import precise

EMPTY = -1e30  # log scale of empty sums


class KernelState(NamedTuple):
    """sum_j phi(k_j) [v_j, 1] over earlier tokens, as sums * exp(log)."""

    sums: Tensor  # (B, H_kv, F, d + 1)
    log: Tensor  # (B, H_kv)

    def next(self, k: Features, values: Tensor, writes: Tensor, keeps: Tensor) -> "KernelState":
        """The state after keys of which `writes` (B, T) enter; `keeps` (B,): whether the old state stays."""
        logs = k.log.masked_fill(~writes[:, None], -torch.inf)
        old = self.log.masked_fill(~keeps[:, None], -torch.inf)
        log = torch.maximum(old, logs.amax(-1)).clamp(min=EMPTY).detach()
        added = (k.values * (logs - log[..., None]).exp()[..., None]).mT @ values
        return KernelState(self.sums * (old - log).exp()[..., None, None] + added, log)

    @classmethod
    def empty(cls, k: Features, values: Tensor) -> "KernelState":
        """The state before the first token."""
        sums = k.values.new_zeros(*k.values.shape[:2], k.values.shape[-1], values.shape[-1])
        return cls(sums, sums.new_full(sums.shape[:2], EMPTY))


class Sums(NamedTuple):
    """sum_j w_ij [v_j, 1] for each query i, as values * exp(log); the last column is the sum of weights."""

    values: Tensor  # (B, H_kv, G, L, d + 1)
    log: Tensor  # (B, H_kv, G, L)

    @classmethod
    def of_pairs(cls, q: Features, k: Features, values: Tensor, visible: Tensor) -> "Sums":
        """Over keys (B, H_kv, T, F) with values (B, H_kv, T, d + 1); visible: (B, L, T) bool."""
        logs = k.log[:, :, None].masked_fill(~visible[:, None], -torch.inf)
        log = (
            logs.amax(-1).clamp(min=EMPTY).detach()
        )  # of the keys that a query sees, so later ones change nothing
        weights = q.values @ k.values.mT[:, :, None] * (logs - log[..., None]).exp()[:, :, None]
        return cls(weights @ values[:, :, None], log[:, :, None] + q.log)

    @classmethod
    def of_state(cls, q: Features, state: KernelState, reads: Tensor) -> "Sums":
        """Over the keys of a state, for the queries that see it; reads: (B, L) bool."""
        values = q.values @ state.sums[:, :, None] * reads[:, None, None, :, None]
        log = state.log[..., None].where(reads[:, None], EMPTY)
        return cls(values, log[:, :, None] + q.log)

    def plus(self, other: "Sums") -> "Sums":
        """The sums over both sets of keys."""
        log = torch.maximum(self.log, other.log).detach()
        mine, others = (x.values * (x.log - log).exp()[..., None] for x in (self, other))
        return Sums(mine + others, log)

    def mean(self) -> Tensor:
        """(B, H_kv, G, L, d): the weighted mean of the values; 0 without weight."""
        total = self.values[..., -1:]
        empty = total.abs() < torch.finfo(total.dtype).tiny
        return self.values[..., :-1] / total.masked_fill(empty, torch.inf)


def with_ones(v: Tensor) -> Tensor:
    """[v, 1] in float32 or better."""
    return F.pad(precise(v), (0, 1), value=1.0)
