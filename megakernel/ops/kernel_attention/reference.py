"""Kernel attention from its formula: all pairs, in one matrix. Quadratic; what the other backends are compared with."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import wide
from megakernel.ops.documents import Positions, open_documents, position_rows
from megakernel.ops.feature_maps import features
from megakernel.ops.state import Exchange, KernelState


def phi(name: str, x: Tensor, projection: Tensor | None) -> Tensor:
    """phi(x) (B, H_kv, R, F) for x (B, H_kv, R, d), its scale multiplied in."""
    values, log_scale = features(name, x[:, :, None], projection)
    out = values if log_scale is None else values * torch.exp(log_scale)[..., None]
    return out[:, :, 0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    projection: Tensor | None,
    causal: bool,
    normalize: bool,
    mass: Tensor | None,
    positions: Positions,
    initial_state: KernelState | None,
    exchange: Exchange | None = None,
) -> tuple[Tensor, KernelState]:
    """Arguments and results of `chunked.attend`."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    at = position_rows(positions, length, q.device)
    place = torch.arange(length, device=q.device)
    first = place - at
    pairs = first[:, :, None] == first[:, None, :]
    if causal:
        pairs = pairs & (place[:, None] >= place)

    phi_q = phi(feature_map, q.to(wide(q.dtype)), per_query_head(projection, group))
    phi_k = phi(feature_map, k.to(wide(k.dtype)), projection)
    if mass is not None:
        phi_k = phi_k * mass[..., None]
    values = torch.cat([v, torch.ones_like(v[..., :1])], -1).to(phi_k.dtype)

    last = pairs[:, -1, :, None].to(phi_k.dtype)[:, None]
    sums = (phi_k * last).transpose(-1, -2) @ values
    carries = open_documents(positions, length, batch, q.device)
    if exchange is not None:
        initial_state = exchange(KernelState(sums, sums.new_zeros(sums.shape[:2])), carries).wait()
    weights = (phi_q @ phi_k.repeat_interleave(group, 1).transpose(-1, -2)) * pairs[:, None]
    total = weights @ values.repeat_interleave(group, 1)
    if initial_state is not None:
        entering = initial_state.sums * torch.exp(initial_state.log_scale)[..., None, None]
        reads = (first < 0)[:, None, :, None]
        total = total + (phi_q @ entering.repeat_interleave(group, 1)) * reads
        sums = sums + entering * carries[:, None, None, None]
    numerator, denominator = total[..., :-1], total[..., -1:]
    empty = denominator == 0
    out = torch.where(empty, 0.0, numerator / denominator.masked_fill(empty, 1.0)) if normalize else numerator
    return out.to(v.dtype), KernelState(sums, sums.new_zeros(sums.shape[:2]))


def per_query_head(projection: Tensor | None, group: int) -> Tensor | None:
    """The projections of key heads as those of their `group` query heads each."""
    if projection is None or projection.dim() == 2:
        return projection
    return projection.repeat_interleave(group, 0)
