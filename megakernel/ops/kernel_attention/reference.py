"""Quadratic kernel attention in float64, straight from the formula; the other backends are tested against it."""

import torch
from torch import Tensor

from megakernel.ops.documents import open_documents, token_positions
from megakernel.ops.feature_maps import Map, features
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.mixture import by_component
from megakernel.ops.partial_output import PartialOutput, normalized, unnormalized
from megakernel.ops.projections import FastFood, Projection, dense
from megakernel.ops.state import EMPTY, KernelState, keep, merge


def phi(feature_map: Map | str, x: Tensor, projection: Projection | None) -> Tensor:
    """phi(x) (B, H_kv, R, F) for x (B, H_kv, R, d), including its scale."""
    values, log_scale = scaled_phi(feature_map, x, projection)
    return values * torch.exp(log_scale)[..., None]


def scaled_phi(feature_map: Map | str, x: Tensor, projection: Projection | None) -> tuple[Tensor, Tensor]:
    """phi(x) (B, H_kv, R, F) for x (B, H_kv, R, d) and its log scale (B, H_kv, R); a FastFood becomes a matrix."""
    values, log_scale = features(feature_map, x[:, :, None], dense(projection, x.shape[-1]))
    values = values[:, :, 0]
    return values, values.new_zeros(values.shape[:-1]) if log_scale is None else log_scale[:, :, 0]


def attend(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState]:
    """Same arguments and results as `chunked.attend`."""
    feature_map, projection, causal, normalize, key_weights, priors, positions, initial_state, *_ = options
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    at = token_positions(positions, length, q.device)
    place = torch.arange(length, device=q.device)
    first = place - at
    # Cross-attention (another number of keys): every query sees all keys.
    same = k.shape[2] == length
    pairs = first[:, :, None] == first[:, None, :] if same else at.new_ones(1, length, k.shape[2]).bool()
    if causal:
        pairs = pairs & (place[:, None] >= place)

    phi_q, logs_q = scaled_phi(feature_map, q.double(), per_query_head(projection, group))
    components, shares = by_component(k.double(), priors, q.shape[-1])
    phi_components, logs = map(
        torch.stack, zip(*(scaled_phi(feature_map, key, projection) for key in components), strict=True)
    )
    logs_k = logs.amax(0)
    phi_k = (shares[:, None] * phi_components * torch.exp(logs - logs_k)[..., None]).sum(0)
    if key_weights is not None:
        phi_k, logs_k = phi_k * key_weights[..., None], logs_k.masked_fill(key_weights == 0, EMPTY)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1).double()

    def state_of(selected: Tensor) -> KernelState:
        """The state of the keys selected by a mask (B, N_k)."""
        logs = torch.where(selected[:, None], logs_k, EMPTY)
        scale = logs.amax(-1)
        weights = torch.where(selected[:, None], torch.exp(logs - scale[..., None]), 0.0)
        return KernelState((phi_k * weights[..., None]).transpose(-1, -2) @ values, scale)

    leaving = state_of(pairs[:, -1])
    carries = open_documents(positions, length, batch, q.device)
    entering = [] if initial_state is None else [(initial_state, first < 0)]
    if options.exchange is not None:
        entering.append((options.exchange(leaving, carries).wait(), first < 0))
    if options.exchange_after is not None:
        began_before = pairs[:, 0] & (at[:, :1] > 0)
        entering.append((options.exchange_after(state_of(began_before), carries).wait(), pairs[:, -1]))

    # Divide a query's weights by the largest scale among the keys and states that it sees.
    pair_logs = torch.where(pairs[:, None], logs_k.repeat_interleave(group, 1)[:, :, None], EMPTY)
    state_logs = [
        torch.where(readers[:, None], state.log_scale.repeat_interleave(group, 1)[..., None], EMPTY)
        for state, readers in entering
    ]
    largest = pair_logs.amax(-1)
    scale = torch.stack([largest, *(logs.expand_as(largest) for logs in state_logs)]).amax(0)
    weights = phi_q @ phi_k.repeat_interleave(group, 1).transpose(-1, -2)
    weights = weights * torch.exp(pair_logs - scale[..., None])
    total = weights.masked_fill(~pairs[:, None], 0.0) @ values.repeat_interleave(group, 1)
    for (state, readers), logs in zip(entering, state_logs, strict=True):
        read = phi_q @ state.sums.double().repeat_interleave(group, 1) * torch.exp(logs - scale)[..., None]
        total = total + read * readers[:, None, :, None]
    if initial_state is not None:
        leaving = merge(leaving, keep(initial_state, carries))
    finish = normalized if normalize else unnormalized
    return finish(PartialOutput(total, logs_q + scale)).to(v.dtype), leaving


def per_query_head(projection: Projection | None, group: int) -> Projection | None:
    """Repeat per-key-head projections for the `group` query heads of each key head."""
    if isinstance(projection, FastFood):
        return FastFood(*(part.repeat_interleave(group, 0) for part in projection))
    if projection is None or projection.dim() == 2:
        return projection
    return projection.repeat_interleave(group, 0)
