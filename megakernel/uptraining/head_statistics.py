"""Statistics of the attention weights of heads, and their means over micro-batches and processes."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import window_reach

from .sampled_queries import SampledQueries


class HeadTag(NamedTuple):
    """TensorBoard tag of a statistic of one head."""

    name: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"transfer/{self.name}/layer_{self.layer}/head_{self.head}"

    @classmethod
    def parse(cls, tag: str) -> "HeadTag":
        """The inverse of `str`."""
        match = re.fullmatch(r"transfer/(.+)/layer_(\d+)/head_(\d+)", tag)
        assert match, tag
        return cls(match[1], int(match[2]), int(match[3]))


class HeadSums:
    """Sums of statistics of each head, and the counts to divide them by.

    Sums over sequences on other data ranks and tokens on other context ranks are added; heads of other tensor ranks and
    layers of other stages are concatenated.
    """

    def __init__(self) -> None:
        self._sums: dict[HeadTag, Tensor] = {}

    def add(self, first: HeadTag, sums: Tensor, counts: Tensor) -> None:
        """Add sums (H,) and their counts, (H,) or a scalar; does not synchronize with the GPU.

        first: tag of the first of the consecutive heads that this process has.
        """
        both = torch.stack([sums.double(), counts.double().expand(sums.shape)])
        self._sums[first] = self._sums[first] + both if first in self._sums else both

    def means(self, gather: Callable[[Any], list[Any]]) -> dict[str, dict[int, Tensor]]:
        """Name -> layer -> means (H,) of all heads, float64 on the CPU; nan where the count is 0.

        gather: all-gathers one object of every process, such as `Mesh.gather_objects`.
        """
        whole: dict[HeadTag, Tensor] = {}
        for part in gather({first: sums.cpu() for first, sums in self._sums.items()}):
            for first, sums in part.items():
                whole[first] = whole[first] + sums if first in whole else sums
        means: dict[str, dict[int, Tensor]] = {}
        for name, layer, head in sorted(whole):
            sums, counts = whole[HeadTag(name, layer, head)]
            layers = means.setdefault(name, {})
            heads = [layers[layer]] if layer in layers else []
            layers[layer] = torch.cat([*heads, sums / counts])
        return means

    def clear(self) -> None:
        """Reset all sums."""
        self._sums.clear()


Window = tuple[int, int]
"""(b, blocks): a token attends exactly to its current block of b tokens and to the blocks - 1 before."""


def head_statistics(
    queries: SampledQueries, student: Tensor, teacher: Tensor, scores: Tensor, window: Window | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> sums (H,) over sampled queries, and the number of these queries (H,).

    entropy, teacher_entropy: of the weights, in nats. rank_correlation: Spearman's, between the student's weights and
    q.k over the keys that a query sees. far_mass, teacher_far_mass: share of the weights on tokens outside of the
    student's local window, including the student's gate; absent if it has no window.

    Args:
        queries: the sampled queries.
        student, teacher: weights (B, H, R, N), 0 where a query does not see the key. Negative weights, which some
            mechanisms have (cosines without smoothing), count as 0 in entropy and far_mass.
        scores: q.k / sqrt(d), (B, H, R, N).
        window: the student's local window; None if it has none.
    """
    # Head by head, because ranks are several numbers in float64 per weight.
    heads = zip(student.split(1, 1), teacher.split(1, 1), scores.split(1, 1))
    each = [_statistics_of_heads(queries, *of_head, window=window) for of_head in heads]
    return {
        name: (torch.cat([x[name][0] for x in each]), torch.cat([x[name][1] for x in each]))
        for name in each[0]
    }


def _statistics_of_heads(
    queries: SampledQueries, student: Tensor, teacher: Tensor, scores: Tensor, *, window: Window | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """`head_statistics` of the given heads."""
    seen = queries.visible[:, None].expand_as(student)
    real = queries.real[:, None].expand(student.shape[:3])
    student_shares, teacher_shares = normalized_weights(student), normalized_weights(teacher)
    correlation = _rank_correlation(student, scores, seen)
    statistics = {
        "entropy": _masked_sums(_entropy(student_shares), real),
        "teacher_entropy": _masked_sums(_entropy(teacher_shares), real),
        "rank_correlation": _masked_sums(correlation, ~correlation.isnan()),
    }
    if window is not None:
        far = (far_keys(queries, window) & queries.visible)[:, None]
        looks_far = far.any(-1).expand(student.shape[:3])
        statistics["far_mass"] = _masked_sums((student_shares * far).sum(-1), looks_far)
        statistics["teacher_far_mass"] = _masked_sums((teacher_shares * far).sum(-1), looks_far)
    return statistics


def _masked_sums(values: Tensor, defined: Tensor) -> tuple[Tensor, Tensor]:
    """Values (B, H, R) -> their sums (H,) where defined, and the number of those."""
    return values.masked_fill(~defined, 0.0).sum((0, 2)), defined.sum((0, 2))


def normalized_weights(weights: Tensor) -> Tensor:
    """Normalize weights over the last dimension, with negative ones as 0."""
    positive = weights.clamp(min=0)
    return positive / positive.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _entropy(shares: Tensor) -> Tensor:
    return -torch.special.xlogy(shares, shares).sum(-1)


def far_keys(queries: SampledQueries, window: Window) -> Tensor:
    """(B, R, N) bool: the key is before the local window of the query."""
    size, blocks = window
    query_places = queries.key_places[:, queries.queries, None]
    return queries.key_places[:, None] < query_places - window_reach(query_places, size, blocks)


def _rank_correlation(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """Spearman's correlation (B, H, R) of a and b (B, H, R, N) over the keys seen; nan where one of them is constant.

    Equal values have the mean of their ranks.
    """
    count = seen.sum(-1, keepdim=True).clamp(min=1)
    centered = []
    for x in (a, b):
        ranks = _ranks(x.masked_fill(~seen, torch.inf)).masked_fill(~seen, 0.0)
        centered.append((ranks - ranks.sum(-1, keepdim=True) / count).masked_fill(~seen, 0.0))
    x, y = centered
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def _ranks(x: Tensor) -> Tensor:
    """Ranks within the last dimension, from 0, means for equal values; float64, because squares of ranks are large."""
    ordered = x.contiguous().sort(-1).values
    below = torch.searchsorted(ordered, x.contiguous())
    not_above = torch.searchsorted(ordered, x.contiguous(), right=True)
    return (below + not_above - 1).double() / 2
