"""The recurrent state of kernel attention: the sums over all earlier keys."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

EMPTY = -1e30
"""Log scale of an empty sum. Finite, so that the difference of two is 0 and not NaN."""


class KernelState(NamedTuple):
    """sum_j m_j phi(k_j) [v_j, 1], stored as `sums * exp(log_scale)`.

    The scale keeps unbounded feature maps in range; bounded maps leave it at 0. It is detached: the product does not
    depend on how it is split.
    """

    sums: Tensor
    """(B, H_kv, F, D + 1) float32 or better; the last column is the normalizer z."""

    log_scale: Tensor
    """(B, H_kv), detached; `EMPTY` if an unbounded map has seen no key."""


class PendingState(Protocol):
    """A state exchange in flight; local work overlaps it until `wait`."""

    def wait(self) -> KernelState:
        """The incoming state, with the shapes and dtypes of the one sent; its sums are differentiable."""
        ...


Exchange = Callable[[KernelState, Tensor], PendingState]
"""(sum over this shard's tokens, factor of the incoming state) -> incoming state.

The factor is (B,) bool, False if a document starts in the shard, or a differentiable decay factor (B, H_kv).
"""


class Once:
    """An exchange that runs only once, however often it is called."""

    def __init__(self, begin: Exchange):
        self.begin = begin
        self.pending: PendingState | None = None
        self.arrived: KernelState | None = None

    def __call__(self, state: KernelState, carries: Tensor) -> "Once":
        """Start the exchange on the first call."""
        self.pending = self.pending or self.begin(state, carries)
        return self

    def wait(self) -> KernelState:
        """The incoming state."""
        assert self.pending is not None
        if self.arrived is None:
            self.arrived = self.pending.wait()
        return self.arrived


def empty_state(like: KernelState) -> KernelState:
    """The empty state, with the shapes, dtypes and device of `like`."""
    return KernelState(torch.zeros_like(like.sums), torch.full_like(like.log_scale, EMPTY))


def keep(state: KernelState, kept: Tensor) -> KernelState:
    """`state` where `kept` (B,) is True and the empty state elsewhere, or `state` times factors `kept` (B, H_kv)."""
    if kept.dim() == 2:
        return state._replace(sums=state.sums * kept[..., None, None])
    alive = kept[:, None]
    sums = torch.where(alive[..., None, None], state.sums, 0.0)
    return KernelState(sums, torch.where(alive, state.log_scale, EMPTY))


def decayed(state: KernelState, logs: Tensor) -> KernelState:
    """`state` times exp(logs) (B, H_kv); the gradient of logs goes through the sums."""
    logs = logs.to(state.sums.dtype)
    sums = state.sums * (logs - logs.detach()).exp()[..., None, None]
    return KernelState(sums, (state.log_scale + logs.detach()).clamp(min=EMPTY))


def merge(a: KernelState, b: KernelState) -> KernelState:
    """The state of the keys of both `a` and `b`; differentiable in both sums."""
    log_scale = torch.maximum(a.log_scale, b.log_scale).detach()
    shrink_a = torch.exp(a.log_scale.detach() - log_scale)[..., None, None]
    shrink_b = torch.exp(b.log_scale.detach() - log_scale)[..., None, None]
    return KernelState(a.sums * shrink_a + b.sums * shrink_b, log_scale)
