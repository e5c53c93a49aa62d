"""Histograms that can be added: over parts of a tensor, and over the ranks that share it."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Values bucketized at a time; each takes an 8-byte bucket index."""

_SMALLEST, _LARGEST, _GROWTH = 1e-12, 1e12, 1.1


def _signed_edges() -> Tensor:
    steps = int(torch.tensor(_LARGEST / _SMALLEST, dtype=torch.float64).log() / torch.tensor(_GROWTH).log())
    positive = _SMALLEST * _GROWTH ** torch.arange(steps + 2, dtype=torch.float64)
    return torch.cat([-positive.flip(0), positive]).float()


SIGNED = _signed_edges()
"""Edges for numbers of any size and sign: buckets are 10 % wide, with one for |x| < 1e-12."""

SHARES = torch.linspace(0, 1, 51)
"""Edges for numbers from 0 to 1."""


@dataclass
class Histogram:
    """Counts of finite values in buckets with fixed edges, so that histograms add exactly."""

    counts: Counter[tuple[float, float]] = field(default_factory=Counter)
    """(left, right) edge of a bucket -> values in it; the outer buckets include values beyond them."""

    low: float = float("inf")
    high: float = float("-inf")
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: Tensor, edges: Tensor) -> None:
        """Count the finite `values`, of any shape; edges: SIGNED or SHARES, the same in each call."""
        inner = edges[1:-1].to(values.device)
        counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=values.device)
        for part in values.detach().flatten().split(_CHUNK):
            part = part.float()
            part = part[part.isfinite()]
            if not len(part):
                continue
            counts += torch.bincount(torch.bucketize(part, inner, right=True), minlength=len(counts))
            self.low = min(self.low, part.min().item())
            self.high = max(self.high, part.max().item())
            self.total += part.sum(dtype=torch.float64).item()
            self.squares += part.double().square().sum().item()
        counts = counts.cpu()
        for index in counts.nonzero().flatten().tolist():
            bucket = (edges[index].item(), edges[index + 1].item())
            self.counts[bucket] += int(counts[index])

    def __iadd__(self, other: "Histogram") -> "Histogram":
        self.counts += other.counts
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total += other.total
        self.squares += other.squares
        return self

    @property
    def count(self) -> int:
        """Values counted."""
        return sum(self.counts.values())

    def limits_and_counts(self) -> tuple[list[float], list[int]]:
        """Right edges and counts for TensorBoard, where each bucket begins at the end of the previous one."""
        limits: list[float] = []
        counts: list[int] = []
        for (left, right), count in sorted(self.counts.items()):
            if limits and limits[-1] < left:
                limits.append(left)
                counts.append(0)
            limits.append(right)
            counts.append(count)
        return limits, counts
