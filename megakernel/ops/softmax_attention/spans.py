"""Which keys a query sees: an interval, since documents are contiguous."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import reversed_positions


class Spans(NamedTuple):
    """Query i of a row sees keys first[i] .. last[i]."""

    first: Tensor
    """(B, N) int64"""

    last: Tensor
    """(B, N) int64"""

    def mask(self, queries: slice, low: int, high: int) -> Tensor:
        """(B, n, high - low) bool for some queries and the keys low .. high - 1."""
        at = torch.arange(low, high, device=self.first.device)
        return (at >= self.first[:, queries, None]) & (at <= self.last[:, queries, None])

    def bounds(self, block: int) -> tuple[list[int], list[int]]:
        """For each block of queries the first key that any of them sees, and the key behind the last."""
        missing = -self.first.shape[1] % block
        first = F.pad(self.first, (0, missing), value=2**31)
        last = F.pad(self.last, (0, missing), value=-1)
        low = first.unflatten(1, (-1, block)).amin((0, 2))
        high = last.unflatten(1, (-1, block)).amax((0, 2)) + 1
        lows, highs = torch.stack([low, high]).tolist()
        return lows, highs

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """Pairs of at most `queries` queries and `keys` keys of which some may see each other."""
        count = self.first.shape[1]
        for start, low, high in zip(range(0, count, queries), *self.bounds(queries)):
            for first in range(low, high, keys):
                yield (
                    slice(start, min(start + queries, count)),
                    slice(first, min(first + keys, high)),
                )


def document_spans(positions: Tensor, cached: int, causal: bool) -> Spans:
    """Spans of queries at `positions` (B, N) behind `cached` keys of the same rows."""
    places = torch.arange(cached, cached + positions.shape[1], device=positions.device)
    first = (places - positions).clamp(min=0)
    if causal:
        return Spans(first, places.expand_as(first))
    return Spans(first, places + reversed_positions(positions).flip(1))


def spans_among(documents: Tensor, keys: Tensor, ahead: int | None) -> Spans:
    """Spans of queries among keys of another piece of their rows; empty, first > last, where it has none for them.

    documents: (B, N) and keys: (B, M) say of each token which document it belongs to, increasing along the row and
    beyond the edges of pieces. ahead: how many tokens of the row lie between the first key and the first query, for
    queries that see no later key; None where they do.
    """
    first = torch.searchsorted(keys, documents)
    last = torch.searchsorted(keys, documents, right=True) - 1
    if ahead is not None:
        last = last.clamp(max=torch.arange(ahead, ahead + documents.shape[1], device=last.device))
    return Spans(first, last)
