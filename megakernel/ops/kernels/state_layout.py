"""States in the kernels' padded layout, and their gradients as states of queries."""

import torch
from torch import Tensor

from megakernel.ops.kernels.arguments import State
from megakernel.ops.kernels.feature_maps import Phi
from megakernel.ops.kernels.primitives import padded
from megakernel.ops.state import EMPTY, KernelState


def pack_state(state: KernelState, phi: Phi, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A state in the kernels' padded layout: sums (B, H_kv, FP, VP), normalizers (B, H_kv, FP), log scales."""
    halves = phi.features // phi.rows
    lead = state.sums.unflatten(2, (halves, phi.rows)).to(torch.float32)
    whole = torch.nn.functional.pad(lead, (0, 0, 0, phi.padded_rows - phi.rows)).flatten(2, 3)
    sums = torch.nn.functional.pad(whole[..., :-1], (0, padded(value_dim) - value_dim))
    logs = state.log_scale.to(torch.float32)
    # For bounded maps only the empty state has a scale (EMPTY); kernels would merge window and landmarks by it.
    return (
        sums.contiguous(),
        whole[..., -1].contiguous(),
        logs.contiguous() if phi.unbounded else torch.zeros_like(logs),
    )


def unpack_state(sums: Tensor, norms: Tensor, logs: Tensor, phi: Phi, value_dim: int) -> KernelState:
    """The inverse of `pack_state`."""
    halves = phi.features // phi.rows
    whole = torch.cat([sums[..., :value_dim], norms[..., None]], -1)
    saved = whole.unflatten(2, (halves, phi.padded_rows))[:, :, :, : phi.rows].flatten(2, 3)
    return KernelState(saved, logs.detach())


def gradient_of_last(grad_sums: Tensor, grad_norms: Tensor, last_logs: Tensor) -> State:
    """The gradient of the last state as a state of queries; empty if the last state has no keys, and so no scale."""
    empty = last_logs <= EMPTY / 2
    return State(
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last_logs),
    )


def gradient_of_first(first_logs: Tensor | None, of_queries: State) -> tuple[Tensor, Tensor]:
    """Gradients of the first state's sums and normalizers, from the state of queries; empty without a first state."""
    if first_logs is None:
        return of_queries.sums.new_empty(0), of_queries.sums.new_empty(0)
    # The forward pass used the sums times exp(log scale).
    factor = torch.exp(first_logs + of_queries.logs)
    return of_queries.sums * factor[..., None, None], of_queries.norms * factor[..., None]
