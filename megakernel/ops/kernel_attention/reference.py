"""Kernel attention from its formula: all pairs, in one matrix. Quadratic; what the other backends are compared with."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import wide
from megakernel.ops.documents import Positions, open_documents, position_rows
from megakernel.ops.feature_maps import FeatureMap, features
from megakernel.ops.mixture import by_component
from megakernel.ops.projections import FastFood, Projection, dense
from megakernel.ops.state import Exchange, KernelState
from megakernel.ops.sums import Sums, normalized


def phi(feature_map: FeatureMap | str, x: Tensor, projection: Projection | None) -> Tensor:
    """phi(x) (B, H_kv, R, F) for x (B, H_kv, R, d), its scale multiplied in and fast projections as matrices."""
    values, log_scale = features(feature_map, x[:, :, None], dense(projection, x.shape[-1]))
    out = values if log_scale is None else values * torch.exp(log_scale)[..., None]
    return out[:, :, 0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap | str,
    projection: Projection | None,
    causal: bool,
    normalize: bool,
    mass: Tensor | None,
    priors: Tensor | None = None,
    positions: Positions,
    initial_state: KernelState | None,
    exchange: Exchange | None = None,
    exchange_after: Exchange | None = None,
) -> tuple[Tensor, KernelState]:
    """Arguments and results of `chunked.attend`."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    at = position_rows(positions, length, q.device)
    place = torch.arange(length, device=q.device)
    first = place - at
    # Keys that are another number of tokens belong to the whole row.
    same = k.shape[2] == length
    pairs = first[:, :, None] == first[:, None, :] if same else at.new_ones(1, length, k.shape[2]).bool()
    if causal:
        pairs = pairs & (place[:, None] >= place)

    phi_q = phi(feature_map, q.to(wide(q.dtype)), per_query_head(projection, group))
    components, shares = by_component(k.to(wide(k.dtype)), priors, q.shape[-1])
    phi_k = torch.stack([phi(feature_map, key, projection) for key in components])
    phi_k = (shares[:, None] * phi_k).sum(0)
    if mass is not None:
        phi_k = phi_k * mass[..., None]
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1).to(phi_k.dtype)

    def added(keys: Tensor) -> Tensor:
        """What the keys that (B, N_k) bool names amount to."""
        return (phi_k * keys[:, None, :, None].to(phi_k.dtype)).transpose(-1, -2) @ values

    def received(begin: Exchange, sums: Tensor) -> KernelState:
        return begin(KernelState(sums, sums.new_zeros(sums.shape[:2])), carries).wait()

    sums = added(pairs[:, -1])
    carries = open_documents(positions, length, batch, q.device)
    weights = (phi_q @ phi_k.repeat_interleave(group, 1).transpose(-1, -2)) * pairs[:, None]
    total = weights @ values.repeat_interleave(group, 1)
    entering = [] if initial_state is None else [(initial_state, first < 0)]
    if exchange is not None:
        entering.append((received(exchange, sums), first < 0))
    if exchange_after is not None:
        began_before = pairs[:, 0] & (at[:, :1] > 0)
        entering.append((received(exchange_after, added(began_before)), pairs[:, -1]))
    for state, readers in entering:
        scaled = state.sums * torch.exp(state.log_scale)[..., None, None]
        total = total + (phi_q @ scaled.repeat_interleave(group, 1)) * readers[:, None, :, None]
    if initial_state is not None:
        kept = torch.exp(initial_state.log_scale) * carries[:, None]
        sums = sums + initial_state.sums * kept[..., None, None]
    out = normalized(Sums(total, None)) if normalize else total[..., :-1]
    return out.to(v.dtype), KernelState(sums, sums.new_zeros(sums.shape[:2]))


def per_query_head(projection: Projection | None, group: int) -> Projection | None:
    """The projections of key heads as those of their `group` query heads each."""
    if isinstance(projection, FastFood):
        return FastFood(*(part.repeat_interleave(group, 0) for part in projection))
    if projection is None or projection.dim() == 2:
        return projection
    return projection.repeat_interleave(group, 0)
