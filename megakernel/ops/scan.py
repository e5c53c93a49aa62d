"""The scan core of kernel attention, shared by plain kernels and FLuRKA's far part.

A group of C chunks; each chunk has rows of queries, Lk keys and a state that enters it. A query sees the visible keys of
its own chunk and, if its document began before the chunk, the state; a key enters the state that leaves its chunk unless
a document starts after it. States of all chunks come from one product with a C x C matrix of decays, not from a loop.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.feature_maps import Features
from megakernel.ops.state import EMPTY, KernelState
from megakernel.ops.sums import Sums


class Links(NamedTuple):
    """Who sees whom. Rows of a chunk are ordered (m, G, L): L consecutive tokens, G query heads per key head, m runs.

    The leading B is 1 where all rows of the batch are alike.
    """

    visible: Tensor
    """(B, C, m, L, Lk) bool: the query sees this key of its chunk."""

    reads: Tensor
    """(B, C, m, L) bool: the query sees the state that enters its chunk."""

    writes: Tensor
    """(B, C, Lk) bool: the key enters the state that leaves its chunk."""

    carries: Tensor
    """(B, C) bool: the state that enters the chunk also leaves it."""


def link(first: Tensor, keys: Tensor, *, delay: int) -> Links:
    """Links from places inside the chunk.

    first: (B, C, m, L) place of the first token of the query's document, negative where it lies before the chunk;
    queries stand at places 0 .. m L - 1. keys: (B, C, Lk) places of the keys. A key is seen from `delay` places on.
    """
    *_, runs, length = first.shape
    places = torch.arange(runs * length, device=first.device).view(runs, length, 1)
    at = keys[:, :, None, None, :]
    visible = (at <= places - delay) & (at >= first[..., None])
    last = first[:, :, -1, -1]
    return Links(visible, first < 0, keys >= last[..., None], last < 0)


def scan_chunks(
    queries: Features, keys: Features, values: Tensor, state: KernelState, links: Links
) -> tuple[Sums, KernelState]:
    """Sums for every query and the state that leaves the group.

    queries: (B, H_kv, C, m G L, F); keys: (B, H_kv, C, Lk, F); values: (B, H_kv, C, Lk, D + 1), each key's mass times
    [v, 1], all 0 for a key that does not exist. state: what enters the group.
    """
    _, _, runs, length, _ = links.visible.shape
    heads = queries.values.shape[3] // (runs * length)

    def rows(x: Tensor) -> Tensor:
        """(B, ..., m, L) -> (B, ..., m G L)."""
        return x[..., None, :].expand(*x.shape[:-1], heads, length).flatten(-3)

    logs = None if keys.log_scale is None else keys.log_scale.masked_fill(values[..., -1] == 0, EMPTY)
    decays, entering_logs, written = _decays(values, logs, state, links)
    states = decays @ _stack(state, keys, written)
    entering = states[:, :, :-1].unflatten(-1, (-1, values.shape[-1]))
    leaving = states[:, :, -1].unflatten(-1, (-1, values.shape[-1]))

    weights = queries.values @ keys.values.transpose(-1, -2)
    visible = links.visible[:, None, :, :, None]
    reads = rows(links.reads)[:, None]
    if logs is None:
        weights = _masked(weights, visible)
        seen = (queries.values @ entering).masked_fill(~reads[..., None], 0.0)
        zeros = weights.new_zeros(()).expand(weights.shape[:-1])
        return Sums(weights @ values + seen, zeros), KernelState(leaving, state.log_scale)

    entering_log = entering_logs[:, :, :-1, None, None].expand(*logs.shape[:3], runs, length)
    in_chunk = torch.where(links.visible[:, None], logs[..., None, None, :], EMPTY)
    entering_log = torch.where(links.reads[:, None], entering_log, EMPTY)
    scale = torch.maximum(in_chunk.amax(-1), entering_log)
    shrink = torch.where(links.visible[:, None], torch.exp(in_chunk - scale[..., None]), 0.0)
    weights = (weights.unflatten(3, (runs, heads, length)) * shrink[:, :, :, :, None]).flatten(3, 5)
    kept = torch.where(links.reads[:, None], torch.exp(entering_log - scale), 0.0)
    seen = (queries.values @ entering) * rows(kept)[..., None]
    assert queries.log_scale is not None
    return (
        Sums(weights @ values + seen, queries.log_scale + rows(scale)),
        KernelState(leaving, entering_logs[:, :, -1]),
    )


def write_chunks(keys: Features, values: Tensor, state: KernelState, links: Links) -> KernelState:
    """The state that leaves the group, without queries; arguments as in `scan_chunks`."""
    logs = None if keys.log_scale is None else keys.log_scale.masked_fill(values[..., -1] == 0, EMPTY)
    decays, all_logs, written = _decays(values, logs, state, links)
    sums = decays[:, :, -1:] @ _stack(state, keys, written)
    return KernelState(
        sums[:, :, 0].unflatten(-1, (-1, values.shape[-1])),
        state.log_scale if logs is None else all_logs[:, :, -1],
    )


def read_state(queries: Features, state: KernelState, reads: Tensor) -> Sums:
    """What every query sees of a state alone. queries: (B, H_kv, C, R, F); reads: (B, C, R) bool, where it sees it."""
    seen = (queries.values @ state.sums[:, :, None]).masked_fill(~reads[:, None, ..., None], 0.0)
    if queries.log_scale is None:
        return Sums(seen, seen.new_zeros(()).expand(seen.shape[:-1]))
    logs = torch.where(reads[:, None], state.log_scale[..., None, None], EMPTY)
    return Sums(seen, queries.log_scale + logs)


def _masked(weights: Tensor, visible: Tensor) -> Tensor:
    runs, length = visible.shape[3], visible.shape[5]
    return weights.unflatten(3, (runs, -1, length)).masked_fill(~visible, 0.0).flatten(3, 5)


def _stack(state: KernelState, keys: Features, written: Tensor) -> Tensor:
    """What each chunk adds to the state, behind what enters the group: (B, H_kv, C + 1, F (D + 1))."""
    added = keys.values.transpose(-1, -2) @ written
    return torch.cat([state.sums[:, :, None], added], 2).flatten(-2)


def _decays(
    values: Tensor, logs: Tensor | None, state: KernelState, links: Links
) -> tuple[Tensor, Tensor, Tensor]:
    """How the additions make up the states between chunks.

    Returns the matrix (B, H_kv, C + 1, C + 1) that turns `_stack` into the states entering each chunk and leaving the
    last, the log scales (B, H_kv, C + 1) of these states, and the values as they are added.
    """
    breaks = (~links.carries).cumsum(1)
    breaks = torch.cat([torch.zeros_like(breaks[:, :1]), breaks], 1)
    alive = (breaks[:, :, None] == breaks[:, None, :]).tril()[:, None]
    written = values.masked_fill(~links.writes[:, None, ..., None], 0.0)
    if logs is None:
        return alive.to(values.dtype), state.log_scale, written
    logs = logs.masked_fill(~links.writes[:, None], EMPTY)
    chunk_log = logs.amax(-1)
    written = written * torch.exp(logs - chunk_log[..., None])[..., None]
    added_logs = torch.cat([state.log_scale[:, :, None], chunk_log], 2)
    masked = torch.where(alive, added_logs[:, :, None, :], EMPTY)
    scale = masked.amax(-1)
    return torch.where(alive, torch.exp(masked - scale[..., None]), 0.0), scale, written
