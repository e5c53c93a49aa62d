"""What the heads of a converted layer look at, and numbers of heads as means over micro-batches and processes."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import window_reach

from .sampled_queries import SampledQueries


class HeadTag(NamedTuple):
    """What is measured of which head."""

    name: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"transfer/{self.name}/layer_{self.layer}/head_{self.head}"

    @classmethod
    def parse(cls, tag: str) -> "HeadTag":
        """The reverse of `str`."""
        match = re.fullmatch(r"transfer/(.+)/layer_(\d+)/head_(\d+)", tag)
        assert match, tag
        return cls(match[1], int(match[2]), int(match[3]))


class HeadSums:
    """Sums of numbers of each head and what they are sums over.

    Parts add up: those of sequences on other data ranks, of tokens on other context ranks, and beside them stand heads
    on other tensor ranks and layers on other stages.
    """

    def __init__(self) -> None:
        self._sums: dict[HeadTag, Tensor] = {}

    def add(self, first: HeadTag, sums: Tensor, counts: Tensor) -> None:
        """Sums (H,) over something of which (H,) or one `counts` says how much; nothing waits for the device.

        first: the first of the consecutive heads that this process holds.
        """
        both = torch.stack([sums.double(), counts.double().expand(sums.shape)])
        self._sums[first] = self._sums[first] + both if first in self._sums else both

    def means(self, gather: Callable[[Any], list[Any]]) -> dict[str, dict[int, Tensor]]:
        """Name -> layer -> (H,) of all heads, float64 on the CPU; nan where nothing was counted.

        gather: one value of every process -> those of all, such as `Mesh.gather_objects`.
        """
        whole: dict[HeadTag, Tensor] = {}
        for part in gather({first: sums.cpu() for first, sums in self._sums.items()}):
            for first, sums in part.items():
                whole[first] = whole[first] + sums if first in whole else sums
        found: dict[str, dict[int, Tensor]] = {}
        for name, layer, head in sorted(whole):
            sums, counts = whole[HeadTag(name, layer, head)]
            layers = found.setdefault(name, {})
            heads = [layers[layer]] if layer in layers else []
            layers[layer] = torch.cat([*heads, sums / counts])
        return found

    def clear(self) -> None:
        """Begin anew."""
        self._sums.clear()


Window = tuple[int, int]
"""(b, blocks): a token attends its current block of b tokens exactly, and the blocks - 1 before."""


def head_statistics(
    queries: SampledQueries, student: Tensor, teacher: Tensor, scores: Tensor, window: Window | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> sums (H,) over sampled queries, and the number of queries (H,) that they are over.

    entropy, teacher_entropy: of the weights, in nats. rank_correlation: Spearman's, of the student's weights and q.k
    over the keys that a query sees. far_mass, teacher_far_mass: share of the weights on tokens outside the student's
    near window, the student's gate included; left out where it has no window.

    Args:
        rows: the queries.
        student, teacher: weights (B, H, R, N), 0 where a query does not see the key. Of mechanisms with weights of
            either sign (cosines without smoothing) those below 0 count as 0 in entropies and masses.
        scores: q.k / sqrt(d), (B, H, R, N).
        window: what the student attends exactly; None where it knows no window.
    """
    seen = queries.visible[:, None].expand_as(student)
    real = queries.real[:, None].expand(student.shape[:3])
    student_shares, teacher_shares = shares(student), shares(teacher)
    correlation = _rank_correlation(student, scores, seen)
    found = {
        "entropy": _mean(_entropy(student_shares), real),
        "teacher_entropy": _mean(_entropy(teacher_shares), real),
        "rank_correlation": _mean(correlation, ~correlation.isnan()),
    }
    if window is not None:
        far = (far_keys(queries, window) & queries.visible)[:, None]
        looks_far = far.any(-1).expand(student.shape[:3])
        found["far_mass"] = _mean((student_shares * far).sum(-1), looks_far)
        found["teacher_far_mass"] = _mean((teacher_shares * far).sum(-1), looks_far)
    return found


def _mean(values: Tensor, defined: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, R) -> sums (H,) over what is defined, and its number."""
    return values.masked_fill(~defined, 0.0).sum((0, 2)), defined.sum((0, 2))


def shares(weights: Tensor) -> Tensor:
    """Weights as shares of their sum over the last dimension, those below 0 as 0."""
    positive = weights.clamp(min=0)
    return positive / positive.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _entropy(shares: Tensor) -> Tensor:
    return -torch.special.xlogy(shares, shares).sum(-1)


def far_keys(queries: SampledQueries, window: Window) -> Tensor:
    """(B, R, N) bool: the key stands before the near window of the query."""
    size, blocks = window
    asked = queries.key_places[:, queries.queries, None]
    return queries.key_places[:, None] < asked - window_reach(asked, size, blocks)


def _rank_correlation(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """Spearman's correlation of a and b (B, H, R, N) over the keys seen, (B, H, R); nan where one of them is constant.

    Equal numbers share the mean of their ranks.
    """
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    centred = []
    for x in (a, b):
        ranks = _ranks(x.masked_fill(~seen, torch.inf)).masked_fill(~seen, 0.0)
        centred.append((ranks - ranks.sum(-1, keepdim=True) / count).masked_fill(~seen, 0.0))
    x, y = centred
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def _ranks(x: Tensor) -> Tensor:
    """Mean rank of each number among the last dimension's, from 0, in float64: squares of ranks have many digits."""
    ordered = x.contiguous().sort(-1).values
    below = torch.searchsorted(ordered, x.contiguous())
    not_above = torch.searchsorted(ordered, x.contiguous(), right=True)
    return (below + not_above - 1).double() / 2
