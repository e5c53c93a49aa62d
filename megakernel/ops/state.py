"""The recurrent state of kernel attention: what all keys seen so far amount to."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

EMPTY = -1e30
"""Log scale of a sum without terms. Finite, so that differences of two of them are 0 and never NaN."""


class KernelState(NamedTuple):
    """sum_j m_j phi(k_j) [v_j, 1], stored as `sums * exp(log_scale)`.

    The scale keeps unbounded feature maps in range; bounded maps leave it at 0. It is a constant to autograd:
    the product does not depend on how it is split.
    """

    sums: Tensor
    """(B, H_kv, F, D + 1) float32 or better; the last column is the normalizer z."""

    log_scale: Tensor
    """(B, H_kv), detached; `EMPTY` where an unbounded map has seen no key."""


class PendingState(Protocol):
    """A state exchange under way; the local work goes between its start and `wait`."""

    def wait(self) -> KernelState:
        """The state that enters, shapes and dtypes of the one handed in; differentiable in its sums."""
        ...


Exchange = Callable[[KernelState, Tensor], PendingState]
"""(what my tokens add to the state that leaves, the factor by which what enters leaves too) -> what enters.

The factor is (B,) bool, False where a document starts, or (B, H_kv) of a state that decays, whose gradient is known.
"""


class Once:
    """An exchange that takes place once, however often it is asked for."""

    def __init__(self, begin: Exchange):
        self.begin = begin
        self.pending: PendingState | None = None
        self.arrived: KernelState | None = None

    def __call__(self, state: KernelState, carries: Tensor) -> "Once":
        """Begin, the first time."""
        self.pending = self.pending or self.begin(state, carries)
        return self

    def wait(self) -> KernelState:
        """What enters."""
        assert self.pending is not None
        if self.arrived is None:
            self.arrived = self.pending.wait()
        return self.arrived


def empty_state(like: KernelState) -> KernelState:
    """The state before the first key, of the shapes, dtypes and device of `like`."""
    return KernelState(torch.zeros_like(like.sums), torch.full_like(like.log_scale, EMPTY))


def keep(state: KernelState, kept: Tensor) -> KernelState:
    """`state` where `kept` (B,) is True, the empty state elsewhere; or times factors `kept` (B, H_kv)."""
    if kept.dim() == 2:
        return state._replace(sums=state.sums * kept[..., None, None])
    alive = kept[:, None]
    sums = torch.where(alive[..., None, None], state.sums, 0.0)
    return KernelState(sums, torch.where(alive, state.log_scale, EMPTY))


def decayed(state: KernelState, logs: Tensor) -> KernelState:
    """What is left of a state times exp(logs), (B, H_kv); the gradient of logs goes through the sums."""
    logs = logs.to(state.sums.dtype)
    sums = state.sums * (logs - logs.detach()).exp()[..., None, None]
    return KernelState(sums, (state.log_scale + logs.detach()).clamp(min=EMPTY))


def merge(a: KernelState, b: KernelState) -> KernelState:
    """The state of the keys of `a` and of `b` together; differentiable in both sums."""
    log_scale = torch.maximum(a.log_scale, b.log_scale).detach()
    shrink_a = torch.exp(a.log_scale.detach() - log_scale)[..., None, None]
    shrink_b = torch.exp(b.log_scale.detach() - log_scale)[..., None, None]
    return KernelState(a.sums * shrink_a + b.sums * shrink_b, log_scale)
