"""The chunk scan of kernel attention, shared by plain kernels and FLuRKA's far context.

A group has C chunks; each chunk has rows of queries, Lk keys and an incoming state. A query sees the visible keys of
its chunk and, if its document began before the chunk, the incoming state. A key is added to the chunk's outgoing state
unless a document starts after it. One matrix product computes the states of all chunks, without a loop.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions, pad_positions, token_positions
from megakernel.ops.feature_maps import Features
from megakernel.ops.partial_output import PartialOutput, add
from megakernel.ops.state import EMPTY, KernelState


class Links(NamedTuple):
    """Masks between the queries, keys and states of chunks.

    The rows of a chunk are ordered (m, G, L): m runs of L consecutive tokens, for each of G query heads per key head.
    B is 1 if the masks of all sequences are equal.
    """

    visible: Tensor
    """(B, C, m, L, Lk) bool: whether the query sees this key of its chunk."""

    reads: Tensor
    """(B, C, m, L) bool: whether the query sees the incoming state of its chunk."""

    writes: Tensor
    """(B, C, Lk) bool: whether the key is added to the outgoing state of its chunk."""

    carries: Tensor
    """(B, C) bool: whether the chunk's incoming state is part of its outgoing state."""


def link(first: Tensor, keys: Tensor, *, delay: int) -> Links:
    """Links from token indices relative to the chunk.

    first: (B, C, m, L) index of the first token of the query's document, negative if before the chunk; queries have
    indices 0 .. m L - 1. keys: (B, C, Lk) indices of the keys. A key is visible from `delay` tokens later on.
    """
    *_, runs, length = first.shape
    indices = torch.arange(runs * length, device=first.device).view(runs, length, 1)
    at = keys[:, :, None, None, :]
    visible = (at <= indices - delay) & (at >= first[..., None])
    last = first[:, :, -1, -1]
    return Links(visible, first < 0, keys >= last[..., None], last < 0)


def chunk_links(positions: Positions, length: int, device: torch.device, size: int, delay: int = 0) -> Links:
    """Links of `length` tokens at `positions`, in chunks of `size` or fewer, with one key per token."""
    size = min(size, length)
    padded = pad_positions(token_positions(positions, length, device), -length % size).unflatten(
        1, (-1, size)
    )
    indices = torch.arange(size, device=device)
    return link((indices - padded)[:, :, None], indices.expand(padded.shape), delay=delay)


def alive_chunks(links: Links) -> Tensor:
    """(B, 1, C + 1, C + 1) bool: whether the state after c chunks includes the incoming state (0) or chunk s - 1."""
    breaks = (~links.carries).cumsum(1)
    breaks = torch.cat([torch.zeros_like(breaks[:, :1]), breaks], 1)
    return (breaks[:, :, None] == breaks[:, None, :]).tril()[:, None]


def pairs(queries: Features, keys: Features, values: Tensor, visible: Tensor) -> PartialOutput:
    """Sums over the visible keys of each chunk.

    queries: (B, H_kv, C, m G L, F); keys: (B, H_kv, C, Lk, F); values: (B, H_kv, C, Lk, D + 1), key weights times
    [v, 1], all 0 for missing keys; visible: (B, C, m, L, Lk).
    """
    runs, length = visible.shape[2:4]
    visible = visible[:, None]
    weights = (queries.values @ keys.values.transpose(-1, -2)).unflatten(3, (runs, -1, length))
    if keys.log_scale is None or queries.log_scale is None:
        weights = weights.masked_fill(~visible[:, :, :, :, None], 0.0)
        return PartialOutput(weights.flatten(3, 5) @ values, None)
    # The stabilizer is the maximum over visible keys: later keys must not change outputs, not even by rounding.
    logs = torch.where(visible, existing(keys, values)[..., None, None, :], EMPTY)
    scale = logs.amax(-1)
    shrink = torch.where(visible, torch.exp(logs - scale[..., None]), 0.0)
    weights = weights * shrink[:, :, :, :, None]
    return PartialOutput(weights.flatten(3, 5) @ values, queries.log_scale + _rows(scale, queries))


def scan_chunks(
    queries: Features, keys: Features, values: Tensor, state: KernelState, links: Links
) -> tuple[PartialOutput, KernelState]:
    """Sums for every query and the outgoing state of the group; `state`: its incoming state; tensors as in `pairs`."""
    states = _states(keys, values, state, links)
    # Copied: the carry is saved for backward, and a view would keep the states of all chunks alive.
    leaving = KernelState(states.sums[:, :, -1].clone(), states.log_scale[:, :, -1].clone())
    entering = KernelState(states.sums[:, :, :-1], states.log_scale[:, :, :-1])
    local = pairs(queries, keys, values, links.visible)
    return add(local, read_states(queries, entering, links.reads)), leaving


def write_chunks(keys: Features, values: Tensor, state: KernelState, links: Links) -> KernelState:
    """The outgoing state of the group, without queries."""
    states = _states(keys, values, state, links, last=True)
    return KernelState(states.sums[:, :, 0], states.log_scale[:, :, 0])


def read_states(queries: Features, states: KernelState, reads: Tensor | None) -> PartialOutput:
    """Sums of queries (B, H_kv, C, m G L, F) over the incoming states (B, H_kv, C, ...) of their chunks.

    reads: (B, C, m, L) bool, whether a query sees the state; None: all do.
    """
    if reads is None:
        scale = None if queries.log_scale is None else queries.log_scale + states.log_scale[..., None]
        return PartialOutput(queries.values @ states.sums, scale)
    sums = (queries.values @ states.sums).masked_fill(~_rows(reads[:, None], queries)[..., None], 0.0)
    if queries.log_scale is None:
        return PartialOutput(sums, None)
    logs = torch.where(reads[:, None], states.log_scale[..., None, None], EMPTY)
    return PartialOutput(sums, queries.log_scale + _rows(logs, queries))


def _rows(x: Tensor, queries: Features) -> Tensor:
    """(..., m, L) -> (..., m G L), repeated for all query heads of a key head."""
    runs, length = x.shape[-2:]
    heads = queries.values.shape[3] // (runs * length)
    return x[..., None, :].expand(*x.shape[:-1], heads, length).flatten(-3)


def existing(keys: Features, values: Tensor) -> Tensor:
    """Log scales of keys; `EMPTY` for keys of weight 0, which must not determine a maximum."""
    assert keys.log_scale is not None
    return keys.log_scale.masked_fill(values[..., -1] == 0, EMPTY)


def _states(
    keys: Features, values: Tensor, state: KernelState, links: Links, last: bool = False
) -> KernelState:
    """The incoming states of all chunks and the outgoing state of the group (B, H_kv, C + 1, ...), or only the last.

    The state after chunk c sums the group's incoming state and the additions of chunks up to c, as far as no document
    started since: one triangular matrix of decays times the stacked additions.
    """
    alive = alive_chunks(links)
    if last:
        alive = alive[:, :, -1:]
    written = values.masked_fill(~links.writes[:, None, ..., None], 0.0)
    if keys.log_scale is None:
        decays = alive.to(values.dtype)
        log_scale = torch.zeros_like(state.log_scale)[..., None].expand(-1, -1, alive.shape[2])
    else:
        logs = existing(keys, written)
        added = logs.amax(-1)
        written = written * torch.exp(logs - added[..., None])[..., None]
        logs = torch.where(alive, torch.cat([state.log_scale[..., None], added], 2)[:, :, None], EMPTY)
        log_scale = logs.amax(-1)
        decays = torch.where(alive, torch.exp(logs - log_scale[..., None]), 0.0)
    added_sums = keys.values.transpose(-1, -2) @ written
    stack = torch.cat([state.sums[:, :, None], added_sums], 2).flatten(-2)
    return KernelState((decays @ stack).unflatten(-1, (-1, values.shape[-1])), log_scale)
