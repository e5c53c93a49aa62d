"""Linear-time causal FLuRKA on any device."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import as_queries, chunk_keys, chunk_queries, query_mask, unchunk_queries
from megakernel.ops.documents import Positions, began_before, carry_factor, sees_far, token_positions
from megakernel.ops.feature_maps import Features, LayerMap
from megakernel.ops.flurka_attention import one_token
from megakernel.ops.flurka_attention.options import FlurkaInputs, FlurkaOptions, Weights, landmarks_of
from megakernel.ops.groups import scan_groups
from megakernel.ops.mixture import shifted
from megakernel.ops.partial_output import (
    FinishedOutput,
    PartialOutput,
    add,
    finish_for,
    merge_parts,
    recompute_lost,
    with_ones,
)
from megakernel.ops.scan import Links, link, pairs, read_states, scan_chunks, write_chunks
from megakernel.ops.state import KernelState, Once, decayed
from megakernel.ops.tensors import Tensors, accum_dtype
from megakernel.ops.window import Tail, WindowLayout, empty_tail, rotate_keys, softmax_pairs, window_layout

RUN = 256
"""Tokens per chunk of the far scan: several blocks, so that their landmarks fill a matrix product."""

GROUP = 2048
"""Tokens whose features, windows and states are in memory at once, rounded down to a multiple of a far chunk."""


class _Group(NamedTuple):
    """A group of tokens, as passed to a step of the scan."""

    options: FlurkaOptions
    weights: Weights
    positions: Tensor
    """(B, T) positions; B is 1 if all sequences have the same ones."""

    layout: WindowLayout

    @property
    def phi(self) -> LayerMap:
        return LayerMap(self.options.feature_map, self.weights.projection, self.weights.priors)


def attend(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> tuple[Tensor, KernelState, Tail]:
    """Attention (B, H, N, D), and the far state and the tail after the last token.

    With `exchange`, the entering far state comes from it, and the returned one is what these tokens alone add.
    """
    options, weights, _, positions, _, tail, exchange, log_decay, _ = inputs
    if tail is None:
        tail = empty_tail(k, v, options.block_size * options.blocks)
    if q.shape[2] == 1 and exchange is None:
        return one_token.attend(q, k, v, inputs._replace(tail=tail))
    gate, weights = inputs.gate_logits(q), weights._replace(gate_weight=None)
    far = inputs.initial_far(q, k, v)
    exchange_once = None if exchange is None else Once(exchange)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> FinishedOutput:
        run = partial(_over_groups, options=options, weights=weights, positions=positions)
        if exchange_once is None:
            out, leaving, _ = run(_attend, (q, k, v, log_decay, gate), far, tail)
            return out, leaving
        _, added, _ = run(_write, (k, v, log_decay), far, tail)
        carries = carry_factor(positions, q, log_decay)
        decay_before = None if log_decay is None else log_decay.cumsum(2) - log_decay
        pending = exchange_once(added, carries)
        sums, _, _ = run(_sums, (q, k, v, log_decay), far, tail)
        reads = began_before(positions, q.shape[2], q.device)[:, None]
        out, _, _ = run(_add_entering, (q, v, gate, decay_before, reads, *sums), pending.wait(), tail)
        return out, added

    finished, leaving = compute(q, k, v)
    out = recompute_lost(finished, lambda: compute(q.double(), k.double(), v.double())[0][0])
    return out, leaving, tail.after(k, v)


def _over_groups(
    step,
    inputs: Tensors,
    far: KernelState,
    tail: Tail,
    *,
    options: FlurkaOptions,
    weights: Weights,
    positions: Positions,
):
    """Scan `step(inputs, far, tail, group) -> outputs, far, tail` over groups of tokens."""
    runs = max(1, RUN // options.block_size)
    span = runs * options.block_size
    dtype = torch.promote_types(accum_dtype(inputs[0].dtype), far.sums.dtype)
    far = KernelState(*(x.to(dtype) for x in far))

    def on_group(positions: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        length, device = sequences[0].shape[2], far.sums.device
        layout = window_layout(
            positions, length, device, block_size=options.block_size, blocks=options.blocks, runs=runs
        )
        entering = KernelState(carry[0], carry[1].detach())
        group = _Group(options, Weights(*shared), token_positions(positions, length, device), layout)
        outputs, leaving, next_tail = step(sequences, entering, Tail(*carry[2:]), group)
        return outputs, (*leaving, *next_tail)

    group = span * max(1, GROUP // span)
    outputs, final = scan_groups(
        on_group, (*far, *tail), inputs, tuple(weights), group=group, positions=positions
    )
    return outputs, KernelState(final[0], final[1].detach()), Tail(*final[2:])


def _attend(inputs: Tensors, far: KernelState, tail: Tail, group: _Group):
    q, k, v, log_decay, gate = inputs
    near, landmarks, far = _near_and_far(q, k, v, log_decay, far, tail, group)
    merged = _merge(near, landmarks, gate, group.layout.positions, q.shape[1], group)
    return as_queries(merged, q, v.dtype), far, tail.after(k, v)


def _sums(inputs: Tensors, far: KernelState, tail: Tail, group: _Group):
    q, k, v, log_decay = inputs
    near, landmarks, far = _near_and_far(q, k, v, log_decay, far, tail, group)
    parts = (near.values, near.scale_or_zero, landmarks.values, landmarks.scale_or_zero)
    return tuple(unchunk_queries(x, q.shape[1], q.shape[2]) for x in parts), far, tail.after(k, v)


def _write(inputs: Tensors, far: KernelState, tail: Tail, group: _Group):
    k, v, log_decay = inputs
    dtype = far.sums.dtype
    windows = group.layout.windows(tail.keys.to(dtype), k.to(dtype))
    values = group.layout.windows(tail.values.to(dtype), v.to(dtype))
    keys, values, links = _landmarks(windows, values, log_decay, group)
    return (), _decay_by_group(write_chunks(keys, values, far, links), log_decay), tail.after(k, v)


def _add_entering(inputs: Tensors, far: KernelState, tail: Tail, group: _Group):
    """Add the entering state to the local sums of documents that began before the shard, then merge near and far."""
    q, v, gate, decay_before, reads, *sums = inputs
    heads, length, kv_heads = q.shape[1], q.shape[2], far.sums.shape[1]
    far_q = q.to(far.sums.dtype)
    if group.options.far_rotary:
        far_q = group.options.far_rotary(far_q, group.positions)
    phi_q = group.phi.of_queries(chunk_queries(far_q, kv_heads, length))
    phi_q = _scaled(phi_q, None if decay_before is None else decay_before[:, :, None])
    near, near_log, local, local_log = (
        chunk_queries(x if x.dim() == 4 else x[..., None], kv_heads, length) for x in sums
    )
    entering = KernelState(far.sums[:, :, None], far.log_scale[:, :, None])
    landmarks = add(PartialOutput(local, local_log[..., 0]), read_states(phi_q, entering, reads[:, :, None]))
    near_sums = PartialOutput(near, near_log[..., 0])
    merged = _merge(near_sums, landmarks, gate, group.positions[:, None], heads, group)
    return as_queries(merged, q, v.dtype), far, tail


def _near_and_far(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, far: KernelState, tail: Tail, group: _Group
) -> tuple[PartialOutput, PartialOutput, KernelState]:
    """Sums over the window, sums over landmarks, and the far state after the group."""
    options, layout = group.options, group.layout
    kv_heads, dtype = k.shape[1], far.sums.dtype
    chunks, size = layout.positions.shape[1:]
    q, k = q.to(dtype), k.to(dtype)
    past = tail.keys.to(dtype)
    values = with_ones(layout.windows(tail.values.to(dtype), v.to(dtype)))
    windows = layout.windows(past, k)
    near_past, near_keys = (shifted(x, group.weights.shift) for x in (past, k))
    if options.near_rotary:
        near_past, near_keys = rotate_keys(options.near_rotary, near_past, near_keys, group.positions)
    near_keys = layout.windows(near_past, near_keys)

    far_q = options.far_rotary(q, group.positions) if options.far_rotary else q
    phi_q = group.phi.of_queries(chunk_queries(far_q, kv_heads, size, chunks))
    if options.near == "kernel":
        near = pairs(phi_q, group.phi.of_keys(near_keys), values, layout.visible()[:, :, None])
    else:
        near_q = options.near_rotary(q, group.positions) if options.near_rotary else q
        queries = chunk_queries(near_q, kv_heads, size, chunks)
        near = softmax_pairs(queries, near_keys, values, layout.visible(), group.weights.priors)

    keys, far_values, links = _landmarks(windows, values[..., :-1], log_decay, group)
    if log_decay is not None:
        # The entering state and the (undecayed) landmarks have decayed by all tokens before the query.
        phi_q = _scaled(phi_q, _in_chunks(log_decay.cumsum(2) - log_decay, layout))
    merged = Features._make(None if x is None else _merge_chunks(x, layout.runs) for x in phi_q)
    sums, far = scan_chunks(merged, keys, far_values, far, links)
    landmarks = PartialOutput._make(None if x is None else _split_chunks(x, layout.runs) for x in sums)
    return near, landmarks, _decay_by_group(far, log_decay)


def _in_chunks(x: Tensor, layout: WindowLayout) -> Tensor:
    """(B, H_kv, T) -> (B, H_kv, C, L)."""
    return chunk_keys(x[..., None], layout.size, layout.positions.shape[1])[..., 0]


def _scaled(phi: Features, logs: Tensor | None) -> Features:
    """phi (B, H_kv, C, G L, F) times exp(logs (B, H_kv, C, L)): in the log scale, with gradients through the values."""
    if logs is None:
        return phi
    logs = logs.to(phi.values.dtype).repeat(1, 1, 1, phi.values.shape[3] // logs.shape[3])
    scale = logs.detach() if phi.log_scale is None else phi.log_scale + logs.detach()
    return Features(phi.values * (logs - logs.detach()).exp()[..., None], scale)


def _decay_by_group(far: KernelState, log_decay: Tensor | None) -> KernelState:
    """The state after a group's decay; before that, its log scales are relative to the start of the group."""
    return far if log_decay is None else decayed(far, log_decay.sum(2))


def _merge_chunks(x: Tensor, runs: int) -> Tensor:
    """(B, H, C, R, ...) -> (B, H, C / runs, runs R, ...)."""
    return x.unflatten(2, (-1, runs)).flatten(3, 4)


def _split_chunks(x: Tensor, runs: int) -> Tensor:
    """The inverse of `_merge_chunks`."""
    return x.unflatten(3, (runs, -1)).flatten(2, 3)


def _landmarks(
    keys: Tensor, values: Tensor, log_decay: Tensor | None, group: _Group
) -> tuple[Features, Tensor, Links]:
    """Features and weighted values of the landmarks that become visible in this group, and links to their queries.

    keys, values: windows (B, H_kv, C, W, .). Where a block ends, the block `blocks` - 1 before it leaves the
    window of all later tokens, and its landmarks enter the far part. A chunk has at most one such end.
    """
    options, layout = group.options, group.layout
    places = layout.positions
    ends = layout.block_ends()
    at = ends.int().argmax(-1)
    pools = _pools(at, group, keys.dtype)
    window = options.block_size if layout.aligned else keys.shape[3]
    keys, values = keys[..., :window, :], values[..., :window, :]
    end = places.gather(-1, at[..., None])[..., 0]
    landmarks, pooled = landmarks_of(keys, values, pools, end, ends.any(-1), options, group.weights)

    logs = None
    if log_decay is not None:
        # A landmark enters undecayed where earlier ones have decayed, so its scale is the inverse of that decay.
        at_end = _in_chunks(-log_decay.cumsum(2), layout).gather(
            3, at[:, None, :, None].expand(*log_decay.shape[:2], -1, 1)
        )
        logs = _merge_chunks(at_end.expand(-1, -1, -1, landmarks.shape[3]), layout.runs)

    chunk, runs, size = torch.arange(places.shape[1], device=at.device), layout.runs, layout.size
    at = (at + chunk % runs * size)[..., None].expand(-1, -1, landmarks.shape[3])
    inside = torch.arange(runs * size, device=at.device).view(runs, size)
    links = link(inside - places.unflatten(1, (-1, runs)), at.unflatten(1, (-1, runs)).flatten(2), delay=1)
    phi_k = _scaled(group.phi.of_keys(_merge_chunks(landmarks, runs)), logs)
    return phi_k, _merge_chunks(pooled, runs), links


def _pools(at: Tensor, group: _Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """E and F shifted to their blocks in the windows, (B, H_kv, C, r, W); blocks become visible at place `at`."""
    options, layout = group.options, group.layout
    keys, values = (
        (x if x.dim() == 3 else x[None])[:, None].to(dtype)
        for x in (group.weights.pool_keys, group.weights.pool_values)
    )
    if layout.aligned:
        return keys, values
    start = layout.halo + at - options.block_size * options.blocks + 1
    block = start[..., None] + torch.arange(options.block_size, device=at.device)
    window = torch.arange(layout.halo + layout.size, device=at.device)
    shift = (block[..., None] == window).to(dtype)[:, None]
    return keys @ shift, values @ shift


def _merge(
    near: PartialOutput, far: PartialOutput, gate: Tensor | None, places: Tensor, heads: int, group: _Group
) -> tuple[Tensor, ...]:
    """The merged output (B, H_kv, C, G L, D) and, if queries can be lost, which are. places: (B, C, L) positions."""
    options, kv_heads = group.options, near.values.shape[1]
    finish = finish_for(options.feature_map, True)
    query_heads = heads // kv_heads
    if gate is None:
        if group.weights.far_weight is not None:
            weight = torch.exp(group.weights.far_weight.to(far.values.dtype)).view(kv_heads, 1, query_heads)
            weight = weight.repeat_interleave(places.shape[2], 2)
            far = PartialOutput(far.values * weight[..., None], far.log_scale)
        return merge_parts(near, far, None, finish)
    chunks, size = places.shape[1:]
    share = torch.sigmoid(chunk_queries(gate[..., None].to(near.values.dtype), kv_heads, size, chunks))
    # Without a far block, the output is exactly the near part: far is 0 there, and must not get a share.
    far_queries = query_mask(sees_far(places, options.block_size, options.blocks), query_heads)
    out, *lost = merge_parts(near, far, torch.where(far_queries, share, 1.0)[..., 0], finish)
    return out, *(mask & far_queries[..., 0] for mask in lost)
