"""Kernel attention from its formula: all pairs, in one float64 matrix. What the other backends are compared with."""

import torch
from torch import Tensor

from megakernel.ops.documents import open_documents, token_positions
from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.mixture import by_component
from megakernel.ops.partial_output import PartialOutput, normalized, unnormalized
from megakernel.ops.phi import features
from megakernel.ops.projections import FastFood, Projection, dense
from megakernel.ops.state import EMPTY, KernelState, keep, merge


def phi(feature_map: FeatureMap | str, x: Tensor, projection: Projection | None) -> Tensor:
    """phi(x) (B, H_kv, R, F) for x (B, H_kv, R, d), its scale multiplied in."""
    values, log_scale = scaled_phi(feature_map, x, projection)
    return values * torch.exp(log_scale)[..., None]


def scaled_phi(
    feature_map: FeatureMap | str, x: Tensor, projection: Projection | None
) -> tuple[Tensor, Tensor]:
    """phi(x) (B, H_kv, R, F) for x (B, H_kv, R, d) by fast projections as matrices, and its log scale (B, H_kv, R)."""
    values, log_scale = features(feature_map, x[:, :, None], dense(projection, x.shape[-1]))
    values = values[:, :, 0]
    return values, values.new_zeros(values.shape[:-1]) if log_scale is None else log_scale[:, :, 0]


def attend(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState]:
    """Arguments and results of `chunked.attend`."""
    feature_map, projection, causal, normalize, key_weights, priors, positions, initial_state, *_ = options
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    at = token_positions(positions, length, q.device)
    place = torch.arange(length, device=q.device)
    first = place - at
    # Keys that are another number of tokens belong to the whole sequence.
    same = k.shape[2] == length
    pairs = first[:, :, None] == first[:, None, :] if same else at.new_ones(1, length, k.shape[2]).bool()
    if causal:
        pairs = pairs & (place[:, None] >= place)

    phi_q, logs_q = scaled_phi(feature_map, q.double(), per_query_head(projection, group))
    components, shares = by_component(k.double(), priors, q.shape[-1])
    each, logs = map(
        torch.stack, zip(*(scaled_phi(feature_map, key, projection) for key in components), strict=True)
    )
    logs_k = logs.amax(0)
    phi_k = (shares[:, None] * each * torch.exp(logs - logs_k)[..., None]).sum(0)
    if key_weights is not None:
        phi_k, logs_k = phi_k * key_weights[..., None], logs_k.masked_fill(key_weights == 0, EMPTY)
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1).double()

    def added(keys: Tensor) -> KernelState:
        """What the keys that (B, N_k) bool names amount to."""
        there = torch.where(keys[:, None], logs_k, EMPTY)
        scale = there.amax(-1)
        weights = torch.where(keys[:, None], torch.exp(there - scale[..., None]), 0.0)
        return KernelState((phi_k * weights[..., None]).transpose(-1, -2) @ values, scale)

    own = added(pairs[:, -1])
    carries = open_documents(positions, length, batch, q.device)
    entering = [] if initial_state is None else [(initial_state, first < 0)]
    if options.exchange is not None:
        entering.append((options.exchange(own, carries).wait(), first < 0))
    if options.exchange_after is not None:
        began_before = pairs[:, 0] & (at[:, :1] > 0)
        entering.append((options.exchange_after(added(began_before), carries).wait(), pairs[:, -1]))

    # A query's weights are divided by the largest scale among what it sees.
    seen = torch.where(pairs[:, None], logs_k.repeat_interleave(group, 1)[:, :, None], EMPTY)
    of_states = [
        torch.where(readers[:, None], state.log_scale.repeat_interleave(group, 1)[..., None], EMPTY)
        for state, readers in entering
    ]
    scale = torch.stack([seen.amax(-1), *(logs.expand_as(seen[..., 0]) for logs in of_states)]).amax(0)
    weights = (phi_q @ phi_k.repeat_interleave(group, 1).transpose(-1, -2)) * torch.exp(
        seen - scale[..., None]
    )
    total = weights.masked_fill(~pairs[:, None], 0.0) @ values.repeat_interleave(group, 1)
    for (state, readers), logs in zip(entering, of_states, strict=True):
        read = phi_q @ state.sums.double().repeat_interleave(group, 1) * torch.exp(logs - scale)[..., None]
        total = total + read * readers[:, None, :, None]
    if initial_state is not None:
        own = merge(own, keep(initial_state, carries))
    finish = normalized if normalize else unnormalized
    return finish(PartialOutput(total, logs_q + scale)).to(v.dtype), own


def per_query_head(projection: Projection | None, group: int) -> Projection | None:
    """The projections of key heads as those of their `group` query heads each."""
    if isinstance(projection, FastFood):
        return FastFood(*(part.repeat_interleave(group, 0) for part in projection))
    if projection is None or projection.dim() == 2:
        return projection
    return projection.repeat_interleave(group, 0)
