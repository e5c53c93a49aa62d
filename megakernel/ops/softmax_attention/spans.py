"""Which keys a query sees: an interval, since documents are contiguous."""

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


def document_spans(positions: Tensor, cached: int, causal: bool) -> Spans:
    """Spans of queries at `positions` (B, N) behind `cached` keys of the same rows."""
    places = torch.arange(cached, cached + positions.shape[1], device=positions.device)
    first = (places - positions).clamp(min=0)
    if causal:
        return Spans(first, places.expand_as(first))
    return Spans(first, places + reversed_positions(positions).flip(1))
