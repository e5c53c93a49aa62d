"""One token of FLuRKA on any device: no chunks, no masks where rows stand alike, and landmarks where a block ends."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import join_token, token_queries
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.documents import Positions, ends_block, position_rows, sees_far
from megakernel.ops.feature_maps import Features
from megakernel.ops.flurka_attention.form import FlurkaInputs, Form, Weights, landmarks_of
from megakernel.ops.mixture import shifted
from megakernel.ops.phi import Phi
from megakernel.ops.scan import Links, pairs, read_states, write_chunks
from megakernel.ops.state import KernelState, empty_state, faded, keep
from megakernel.ops.sums import Found, Sums, add, finish_of, in_range, with_ones
from megakernel.ops.window import Recent, Tail, recent


class _Place(NamedTuple):
    """Where the token stands, as the host decides by: a layer does for all rows what one of them needs."""

    begins: bool
    """A row begins a document."""

    sees_far: bool
    """A row has landmarks in sight."""

    all_see_far: bool
    ends_block: bool
    """A row's token brings landmarks into the sight of later ones."""

    @classmethod
    def of(cls, positions: Positions, form: Form) -> "_Place":
        places = [positions] if isinstance(positions, int) else positions[:, 0].tolist()
        size, reach = form.block_size, form.block_size * form.blocks
        ends = any(place % size == size - 1 and place >= reach - 1 for place in places)
        return cls(min(places) == 0, max(places) >= reach, min(places) >= reach, ends)


class _Scaled(Phi):
    """The map with a scale, of a state that fades: its factor lies in the state's scale."""

    def of_queries(self, x: Tensor) -> Features:
        """See Phi."""
        values, log_scale = super().of_queries(x)
        return Features(values, values.new_zeros(values.shape[:-1]) if log_scale is None else log_scale)


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> tuple[Tensor, KernelState, Tail]:
    """Arguments and results of `chunked.attend`, for one token of whole rows."""
    form, weights, gate, positions, far, tail, _, fading, _ = inputs
    assert tail is not None
    place, joined = _Place.of(positions, form), tail.and_token(k, v)

    def found(q: Tensor) -> Found:
        dtype = torch.promote_types(accum_dtype(q.dtype), far.sums.dtype)
        state = KernelState(*(x.to(dtype) for x in far))
        if place.begins:
            state = empty_state(state) if isinstance(positions, int) else keep(state, positions[:, 0] > 0)
        phi = Phi(form.feature_map, weights.projection, weights.priors)
        if fading is not None:
            phi = _Scaled(*phi)
        out, *lost = _output(q.to(dtype), joined, state, positions, place, phi, form, weights, gate)
        if place.ends_block:
            if fading is not None:
                state = faded(state, fading[:, :, 0])
            state = _with_landmarks(joined, state, positions, phi, form, weights)
        return (out.to(v.dtype), *lost), state

    out, leaving = in_range(found(q), lambda: found(q.double()))
    return out, leaving._replace(log_scale=leaving.log_scale.detach()), joined.without_oldest


def _output(
    q: Tensor,
    joined: Tail,
    far: KernelState,
    positions: Positions,
    place: _Place,
    phi: Phi,
    form: Form,
    weights: Weights,
    gate: Tensor | None,
) -> tuple[Tensor, ...]:
    """(B, H, 1, D), and which rows (B, H, 1) got lost, where they can."""
    kv_heads, rows = far.sums.shape[1], position_rows(positions, 1, q.device)
    finish = finish_of(form.feature_map, True)
    seen = recent(joined, positions, form.block_size, form.blocks, q.dtype)
    landmarks = queries = None
    if place.sees_far or form.near == "kernel":
        far_q = form.far_rotary(q, rows) if form.far_rotary else q
        queries = phi.of_queries(token_queries(far_q, kv_heads))
        landmarks = read_states(queries, KernelState(*(x[:, :, None] for x in far)), None)
    if gate is None:
        near = (
            seen.softmax(q, form.near_rotary, weights.priors, weights.shift)
            if form.near == "softmax" or queries is None
            else _under_kernel(seen, queries, rows, phi, form, weights)
        )
        if landmarks is not None and weights.far_weight is not None:
            weight = torch.exp(weights.far_weight.to(q.dtype)).view(kv_heads, 1, -1, 1)
            landmarks = landmarks._replace(values=landmarks.values * weight)
        return tuple(map(join_token, finish(near if landmarks is None else add(near, landmarks))))
    mean = seen.softmax_mean(q, form.near_rotary, weights.priors, weights.shift)
    if landmarks is None:
        return (mean,)
    far_mean, *lost = map(join_token, finish(landmarks))
    share = torch.sigmoid(gate.to(q.dtype))
    if not place.all_see_far:
        # Without a far block the near part alone, exactly: far is 0 there, and must not take its share.
        far_rows = sees_far(rows, form.block_size, form.blocks)[:, None]
        share, lost = torch.where(far_rows, share, 1.0), [some & far_rows for some in lost]
    return (torch.lerp(far_mean, mean, share[..., None]), *lost)


def _under_kernel(
    seen: Recent, queries: Features, rows: Tensor, phi: Phi, form: Form, weights: Weights
) -> Sums:
    """The window weighed as landmarks are."""
    keys, count = shifted(seen.keys, weights.shift), seen.keys.shape[2]
    if form.near_rotary:
        keys = form.near_rotary(keys, rows - torch.arange(count - 1, -1, -1, device=rows.device))
    visible = seen.visible
    if visible is None:
        visible = torch.ones(1, count, dtype=torch.bool, device=rows.device)
    values = with_ones(seen.values)[:, :, None]
    return pairs(queries, phi.of_keys(keys[:, :, None]), values, visible[:, None, None, None])


def _with_landmarks(
    joined: Tail, far: KernelState, positions: Positions, phi: Phi, form: Form, weights: Weights
) -> KernelState:
    """The state with the landmarks of the first block of the windows of tokens that end their block."""
    rows = position_rows(positions, 1, far.sums.device)
    keys, values = (x[:, :, None, 1 : form.block_size + 1].to(far.sums.dtype) for x in joined)
    pools = tuple((x if x.dim() == 3 else x[None])[:, None] for x in (weights.pool_keys, weights.pool_values))
    ends = ends_block(rows, form.block_size, form.blocks)
    landmarks, pooled = landmarks_of(keys, values, pools, rows, ends, form, weights)
    writes = ends[..., None].expand(-1, -1, landmarks.shape[3])
    # Nobody reads the state here, and every document that is open goes on.
    links = Links(visible=ends, reads=ends, writes=writes, carries=torch.ones_like(ends))
    return write_chunks(phi.of_keys(landmarks), pooled, far, links)
