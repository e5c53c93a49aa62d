"""One decoding step of FLuRKA on any device: no chunks, no masks if sequences are alike, landmarks at block ends."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import token_queries, unchunk_token
from megakernel.ops.documents import Positions, ends_block, sees_far, token_positions
from megakernel.ops.feature_maps import Features, LayerMap
from megakernel.ops.flurka_attention.options import FlurkaInputs, FlurkaOptions, Weights, landmarks_of
from megakernel.ops.mixture import shifted
from megakernel.ops.partial_output import (
    FinishedOutput,
    PartialOutput,
    add,
    finish_for,
    recompute_lost,
    with_ones,
)
from megakernel.ops.scan import Links, pairs, read_states, write_chunks
from megakernel.ops.state import KernelState, decayed, empty_state, keep
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.window import Tail, TokenWindow, token_window


class _Branches(NamedTuple):
    """Host-side branches for the token's position: work that any sequence needs is done for all of them."""

    begins: bool
    """Some sequence begins a document."""

    sees_far: bool
    """Some sequence sees landmarks."""

    all_see_far: bool
    ends_block: bool
    """In some sequence, the token makes landmarks visible to later tokens."""

    @classmethod
    def of(cls, positions: Positions, options: FlurkaOptions) -> "_Branches":
        on_host = [positions] if isinstance(positions, int) else positions[:, 0].tolist()
        size, reach = options.block_size, options.block_size * options.blocks
        ends = any(position % size == size - 1 and position >= reach - 1 for position in on_host)
        return cls(min(on_host) == 0, max(on_host) >= reach, min(on_host) >= reach, ends)


class _ScaledMap(LayerMap):
    """A feature map that always has a log scale, because the decay of the state is in the state's log scale."""

    def of_queries(self, x: Tensor) -> Features:
        """See `LayerMap.of_queries`."""
        values, log_scale = super().of_queries(x)
        return Features(values, values.new_zeros(values.shape[:-1]) if log_scale is None else log_scale)


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> tuple[Tensor, KernelState, Tail]:
    """Same arguments and results as `chunked.attend`, for one token and without an exchange."""
    options, weights, _, positions, _, tail, _, log_decay, _ = inputs
    gate = inputs.gate_logits(q)
    far = inputs.initial_far(q, k, v)
    assert tail is not None
    branches, extended = _Branches.of(positions, options), tail.and_token(k, v)

    def compute(q: Tensor) -> FinishedOutput:
        dtype = torch.promote_types(accum_dtype(q.dtype), far.sums.dtype)
        state = KernelState(*(x.to(dtype) for x in far))
        if branches.begins:
            state = empty_state(state) if isinstance(positions, int) else keep(state, positions[:, 0] > 0)
        phi = LayerMap(options.feature_map, weights.projection, weights.priors)
        if log_decay is not None:
            phi = _ScaledMap(*phi)
        out, *lost = _output(q.to(dtype), extended, state, positions, branches, phi, options, weights, gate)
        if branches.ends_block:
            if log_decay is not None:
                state = decayed(state, log_decay[:, :, 0])
            state = _with_landmarks(extended, state, positions, phi, options, weights)
        return (out.to(v.dtype), *lost), state

    finished, leaving = compute(q)
    out = recompute_lost(finished, lambda: compute(q.double())[0][0])
    return out, leaving._replace(log_scale=leaving.log_scale.detach()), extended.without_oldest


def _output(
    q: Tensor,
    extended: Tail,
    far: KernelState,
    positions: Positions,
    branches: _Branches,
    phi: LayerMap,
    options: FlurkaOptions,
    weights: Weights,
    gate: Tensor | None,
) -> tuple[Tensor, ...]:
    """(B, H, 1, D) and, if queries can be lost, which are (B, H, 1)."""
    kv_heads, at = far.sums.shape[1], token_positions(positions, 1, q.device)
    finish = finish_for(options.feature_map, True)
    window = token_window(extended, positions, options.block_size, options.blocks, q.dtype)
    landmarks = queries = None
    if branches.sees_far or options.near == "kernel":
        far_q = options.far_rotary(q, at) if options.far_rotary else q
        queries = phi.of_queries(token_queries(far_q, kv_heads))
        landmarks = read_states(queries, KernelState(*(x[:, :, None] for x in far)), None)
    if gate is None:
        near = (
            window.softmax(q, options.near_rotary, weights.priors, weights.shift)
            if options.near == "softmax" or queries is None
            else _kernel_window(window, queries, at, phi, options, weights)
        )
        if landmarks is not None and weights.far_weight is not None:
            weight = torch.exp(weights.far_weight.to(q.dtype)).view(kv_heads, 1, -1, 1)
            landmarks = landmarks._replace(values=landmarks.values * weight)
        return tuple(map(unchunk_token, finish(near if landmarks is None else add(near, landmarks))))
    near_mean = window.softmax_mean(q, options.near_rotary, weights.priors, weights.shift)
    if landmarks is None:
        return (near_mean,)
    far_mean, *lost = map(unchunk_token, finish(landmarks))
    share = torch.sigmoid(gate.to(q.dtype))
    if not branches.all_see_far:
        # Without a far block, the output is exactly the near part: far is 0 there, and must not get a share.
        has_far = sees_far(at, options.block_size, options.blocks)[:, None]
        share, lost = torch.where(has_far, share, 1.0), [mask & has_far for mask in lost]
    return (torch.lerp(far_mean, near_mean, share[..., None]), *lost)


def _kernel_window(
    window: TokenWindow,
    queries: Features,
    at: Tensor,
    phi: LayerMap,
    options: FlurkaOptions,
    weights: Weights,
) -> PartialOutput:
    """The sums over the window under phi."""
    keys, count = shifted(window.keys, weights.shift), window.keys.shape[2]
    if options.near_rotary:
        keys = options.near_rotary(keys, at - torch.arange(count - 1, -1, -1, device=at.device))
    visible = window.visible
    if visible is None:
        visible = torch.ones(1, count, dtype=torch.bool, device=at.device)
    values = with_ones(window.values)[:, :, None]
    return pairs(queries, phi.of_keys(keys[:, :, None]), values, visible[:, None, None, None])


def _with_landmarks(
    extended: Tail,
    far: KernelState,
    positions: Positions,
    phi: LayerMap,
    options: FlurkaOptions,
    weights: Weights,
) -> KernelState:
    """Add the landmarks of the first block of the window, for tokens that end their block."""
    at = token_positions(positions, 1, far.sums.device)
    keys, values = (x[:, :, None, 1 : options.block_size + 1].to(far.sums.dtype) for x in extended)
    pools = tuple((x if x.dim() == 3 else x[None])[:, None] for x in (weights.pool_keys, weights.pool_values))
    ends = ends_block(at, options.block_size, options.blocks)
    landmarks, pooled = landmarks_of(keys, values, pools, at, ends, options, weights)
    writes = ends[..., None].expand(-1, -1, landmarks.shape[3])
    # The state is not read here, and every open document continues.
    links = Links(visible=ends, reads=ends, writes=writes, carries=torch.ones_like(ends))
    return write_chunks(phi.of_keys(landmarks), pooled, far, links)
