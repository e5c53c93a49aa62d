"""Which keys a query sees: an interval, since documents are contiguous."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import Positions, made_once, reversed_positions, token_positions


class Spans(NamedTuple):
    """Query i of a sequence sees keys first[i] .. last[i]."""

    first: Tensor
    """(B, N) int64"""

    last: Tensor
    """(B, N) int64"""

    positions: Tensor | None = None
    """(B or 1, N) within documents, which the others follow from, of causal sequences without a cache."""

    window: int | None = None
    """Beside `positions`: tokens of its document that a query sees, its own among them."""

    def mask(self, queries: slice, low: int, high: int) -> Tensor:
        """(B, n, high - low) bool for some queries and the keys low .. high - 1."""
        at = torch.arange(low, high, device=self.first.device)
        return (at >= self.first[:, queries, None]) & (at <= self.last[:, queries, None])

    def bounds(self, block: int) -> tuple[list[int], list[int]]:
        """For each block of queries the first key that any of them sees, and the key behind the last."""
        low, high, _, _ = self._limits(block)
        return low, high

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Pairs of at most `queries` queries and `keys` keys of which some may see each other."""
        for start, low, high in zip(range(0, self.first.shape[1], queries), *self.bounds(queries)):
            for some in _cut(low, high, keys):
                yield self._queries(start, queries), some

    def rectangles(self, queries: int, keys: int) -> Iterator[tuple[slice, slice, bool]]:
        """`blocks`, and whether each of their queries sees each of their keys; those that do are as large as can be."""
        start, limits = 0, list(zip(*self._limits(queries)))
        for (begin, end), alike in groupby(limits, key=lambda limit: limit[2:]):
            rows = list(alike)
            if begin < end:
                yield self._queries(start, queries * len(rows)), slice(begin, end), True
            for low, high, _, _ in rows:
                edges = ((low, begin), (end, high)) if begin < end else ((low, high),)
                for first, behind in edges:
                    for some in _cut(first, behind, keys):
                        yield self._queries(start, queries), some, False
                start += queries

    def _queries(self, start: int, count: int) -> slice:
        return slice(start, min(start + count, self.first.shape[1]))

    def _limits(self, block: int) -> tuple[list[int], list[int], list[int], list[int]]:
        """For each block of queries the first key that any sees and the one behind the last; the same for all."""
        missing = -self.first.shape[1] % block

        def blocked(x: Tensor, missed: int) -> Tensor:
            return F.pad(x, (0, missing), value=missed).unflatten(1, (-1, block))

        beyond = 2**31
        low = blocked(self.first, beyond).amin((0, 2))
        high = blocked(self.last, -1).amax((0, 2)) + 1
        begin = blocked(self.first, -1).amax((0, 2))
        end = blocked(self.last, beyond).amin((0, 2)) + 1
        # Together: a GPU is waited for once.
        lows, highs, begins, ends = torch.stack([low, high, begin, end]).tolist()
        return lows, highs, begins, ends


def _cut(start: int, end: int, size: int) -> Iterator[slice]:
    for low in range(start, end, size):
        yield slice(low, min(low + size, end))


def document_spans(
    positions: Positions, q: Tensor, cached: int, causal: bool, window: int | None = None
) -> Spans:
    """Spans of queries q (B, H, N, d) behind `cached` keys of their sequences; causal ones may have a window."""
    make = partial(_spans, cached=cached, causal=causal, window=window)
    if isinstance(positions, Tensor):
        # What is kept with positions must not keep them.
        spans = made_once(positions, (document_spans, cached, causal, window), make)
    else:
        positions = token_positions(positions, q.shape[2], q.device)
        spans = make(positions)
    return spans._replace(positions=positions, window=window) if causal and not cached else spans


def _spans(positions: Tensor, cached: int, causal: bool, window: int | None) -> Spans:
    places = torch.arange(cached, cached + positions.shape[1], device=positions.device)
    first = (places - positions).clamp(min=0)
    if window is not None:
        first = first.maximum(places - window + 1)
    if causal:
        return Spans(first, places.expand_as(first))
    return Spans(first, places + reversed_positions(positions).flip(1))


def spans_among(documents: Tensor, keys: Tensor, ahead: int | None, window: int | None = None) -> Spans:
    """Spans of queries among keys of another shard of their sequences; empty, first > last, where it has none for them.

    documents: (B, N) and keys: (B, M) say of each token which document it belongs to, increasing along the sequence and
    beyond the edges of shards. ahead: how many tokens of the sequence lie between the first key and the first query,
    for queries that see no later key, and no more than `window` of them with their own; None where they do.
    """
    first = torch.searchsorted(keys, documents)
    last = torch.searchsorted(keys, documents, right=True) - 1
    if ahead is not None:
        places = torch.arange(ahead, ahead + documents.shape[1], device=last.device)
        last = last.minimum(places)
        if window is not None:
            first = first.maximum(places - window + 1)
    return Spans(first, last)
