"""The keys that a query sees as an interval, since documents are contiguous."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import (
    Positions,
    cached_for_positions,
    is_graph,
    reversed_positions,
    token_positions,
)


class Spans(NamedTuple):
    """Query i of a sequence sees keys first[i] .. last[i]."""

    first: Tensor
    """(B, N) int64"""

    last: Tensor
    """(B, N) int64"""

    positions: Tensor | None = None
    """(B or 1, N) within documents; given for causal sequences without a cache, whose spans follow from it."""

    window: int | None = None
    """With `positions`: number of tokens that a query sees, including its own."""

    def mask(self, queries: slice, low: int, high: int) -> Tensor:
        """(B, n, high - low) bool: whether the n queries see keys low .. high - 1."""
        at = torch.arange(low, high, device=self.first.device)
        return (at >= self.first[:, queries, None]) & (at <= self.last[:, queries, None])

    def bounds(self, block: int) -> tuple[list[int], list[int]]:
        """For each block of queries, the first key that any of them sees, and the end of the range.

        In a compiled or captured graph, which cannot read the documents: that any of them may see, if the spans are
        those of causal sequences.
        """
        if self.positions is not None and is_graph(self.first):
            length, beyond = (
                self.first.shape[1],
                self.first.shape[1] if self.window is None else self.window - 1,
            )
            starts = range(0, length, block)
            return [max(0, start - beyond) for start in starts], [
                min(start + block, length) for start in starts
            ]
        low, high, _, _ = self._limits(block)
        return low, high

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Tiles of at most `queries` queries and `keys` keys that contain all visible pairs."""
        for start, low, high in zip(range(0, self.first.shape[1], queries), *self.bounds(queries)):
            for tile in _split(low, high, keys):
                yield self._queries(start, queries), tile

    def rectangles(self, queries: int, keys: int) -> Iterator[tuple[slice, slice, bool]]:
        """`blocks`, with whether all of a tile's pairs are visible; such tiles are merged into large ones."""
        start, limits = 0, list(zip(*self._limits(queries)))
        for (begin, end), group in groupby(limits, key=lambda limit: limit[2:]):
            rows = list(group)
            if begin < end:
                yield self._queries(start, queries * len(rows)), slice(begin, end), True
            for low, high, _, _ in rows:
                edges = ((low, begin), (end, high)) if begin < end else ((low, high),)
                for edge_low, edge_high in edges:
                    for tile in _split(edge_low, edge_high, keys):
                        yield self._queries(start, queries), tile, False
                start += queries

    def _queries(self, start: int, count: int) -> slice:
        return slice(start, min(start + count, self.first.shape[1]))

    def _limits(self, block: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """Per block of queries: start and end of the keys that any query sees, and of those that all see."""
        missing = -self.first.shape[1] % block

        def blocked(x: Tensor, padding: int) -> Tensor:
            return F.pad(x, (0, missing), value=padding).unflatten(1, (-1, block))

        beyond = 2**31
        low = blocked(self.first, beyond).amin((0, 2))
        high = blocked(self.last, -1).amax((0, 2)) + 1
        begin = blocked(self.first, -1).amax((0, 2))
        end = blocked(self.last, beyond).amin((0, 2)) + 1
        # Stacked: synchronizes with a GPU only once.
        lows, highs, begins, ends = torch.stack([low, high, begin, end]).tolist()
        return lows, highs, begins, ends


def _split(start: int, end: int, size: int) -> Iterator[slice]:
    for low in range(start, end, size):
        yield slice(low, min(low + size, end))


def document_spans(
    positions: Positions, q: Tensor, cached: int, causal: bool, window: int | None = None
) -> Spans:
    """Spans of queries q (B, H, N, d) whose sequences have `cached` earlier keys; window: only if causal."""
    make = partial(_spans, cached=cached, causal=causal, window=window)
    if isinstance(positions, Tensor):
        # The cached value must not hold a reference to its positions, which would keep them alive.
        spans = cached_for_positions(positions, (document_spans, cached, causal, window), make)
    else:
        positions = token_positions(positions, q.shape[2], q.device)
        spans = make(positions)
    return spans._replace(positions=positions, window=window) if causal and not cached else spans


def _spans(positions: Tensor, cached: int, causal: bool, window: int | None) -> Spans:
    indices = torch.arange(cached, cached + positions.shape[1], device=positions.device)
    first = (indices - positions).clamp(min=0)
    if window is not None:
        first = first.maximum(indices - window + 1)
    if causal:
        return Spans(first, indices.expand_as(first))
    return Spans(first, indices + reversed_positions(positions).flip(1))


def cross_shard_spans(documents: Tensor, keys: Tensor, ahead: int | None, window: int | None = None) -> Spans:
    """Spans of queries over another shard's keys; empty (first > last) for queries that see none.

    documents: (B, N) of queries and keys: (B, M) of keys identify documents by numbers that increase along the whole
    sequence. ahead: tokens from the first key to the first query, for causal queries, which see at most the last
    `window` tokens, including themselves; None: not causal.
    """
    first = torch.searchsorted(keys, documents)
    last = torch.searchsorted(keys, documents, right=True) - 1
    if ahead is not None:
        indices = torch.arange(ahead, ahead + documents.shape[1], device=last.device)
        last = last.minimum(indices)
        if window is not None:
            first = first.maximum(indices - window + 1)
    return Spans(first, last)
