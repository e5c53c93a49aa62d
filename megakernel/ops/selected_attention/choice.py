"""Which blocks queries choose by their landmarks; the choice has no gradient."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.landmark_attention import Landmarks, LandmarkVisibility
from megakernel.ops.selected_attention.inputs import NONE, Score, SelectionRule
from megakernel.ops.selected_attention.readers import numbers_at_once, readers_of
from megakernel.ops.tensors import accum_dtype

ROWS = 1024
"""Queries of a head whose scores are in memory at once."""

ListScorer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries (B, H_kv, G, n, d), places (B, Z, g), lists (B, H_kv, n, l)) -> scores (B, H_kv, n, l, g).

places: of the g blocks of each of Z groups; lists: of n queries. Scores of what is in no list are -inf.
"""


def block_scores(queries: Tensor, landmarks: Tensor, score: Score) -> Tensor:
    """Scores (B, H_kv, n, S), in float32 or better, of S blocks: the largest of a key head's G query heads.

    queries: (B, H_kv, G, n, d); landmarks: (B, H_kv, S, r, d). A block's score is the maximum, or the log-sum-exp, of
    q.l / sqrt(d) over its landmarks.
    """
    group, rank = queries.shape[2], landmarks.shape[3]
    rows = queries.to(accum_dtype(queries.dtype)).flatten(2, 3) * queries.shape[-1] ** -0.5
    products = (rows @ landmarks.to(rows.dtype).flatten(2, 3).transpose(-1, -2)).unflatten(3, (-1, rank))
    return reduced(products, score).unflatten(2, (group, -1)).amax(2)


def reduced(products: Tensor, score: Score) -> Tensor:
    """Scores (...) of blocks from the products (..., r) with their landmarks."""
    return products.amax(-1) if score == "max" else products.logsumexp(-1)


def largest(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Indices (..., k') int64, k' = min(count, S), of the largest visible scores (..., S), in ascending order.

    Of equal scores the first are taken. NONE stands where fewer are visible.
    """
    size = scores.shape[-1]
    count = min(count, size)
    if count == 0:
        return scores.new_empty(*scores.shape[:-1], 0, dtype=torch.int64)
    scores = scores.masked_fill(~visible, -torch.inf)
    # topk does not say which of equal scores it returns.
    smallest = scores.topk(count, -1).values[..., -1:]
    above, equal = scores > smallest, scores == smallest
    wanted = count - above.sum(-1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(-1) <= wanted))) & visible
    places = torch.where(chosen, size - torch.arange(size, device=scores.device), 0)
    best = places.topk(count, -1).values
    return torch.where(best == 0, NONE, size - best)


@torch.no_grad()
def choose_among_all(
    queries: Tensor, landmarks: Landmarks, visibility: LandmarkVisibility, selection: SelectionRule
) -> Tensor:
    """Indices (B, H_kv, n, min(k, S)) int64 of the blocks that n tokens choose, or NONE.

    queries: (B, H_kv, G, n, d), not rotated; visibility: of these tokens.
    """
    chosen = []
    for start in range(0, queries.shape[3], ROWS):
        rows = slice(start, start + ROWS)
        scores = block_scores(queries[:, :, :, rows], landmarks.keys, selection.score)
        seen = LandmarkVisibility(*(x[:, rows] for x in visibility)).visible(landmarks.ends, 1)
        chosen.append(largest(scores, seen[:, None].expand_as(scores), selection.chosen))
    return torch.cat(chosen, 2)


def list_scorer(queries: Tensor, landmarks: Landmarks, selection: SelectionRule) -> ListScorer:
    """Scores parts of these queries (B, H_kv, G, n, d) with the blocks of the groups that they list."""
    return partial(_scores_of_lists, landmarks.keys.to(accum_dtype(queries.dtype)), selection)


def _scores_of_lists(
    landmarks: Tensor, selection: SelectionRule, queries: Tensor, places: Tensor, lists: Tensor
) -> Tensor:
    group, width, rank = queries.shape[2], queries.shape[4], landmarks.shape[3]
    rows = queries.to(landmarks.dtype).movedim(2, 3).flatten(0, 2)  # (X n, G, d)
    keys, at = landmarks.flatten(0, 2), places_of_all(places, landmarks)  # (X S, r, d), (X Z, g)
    readers = readers_of(lists.flatten(0, 1), places.shape[1])
    scores = keys.new_full((lists.numel() + 1, selection.group), -torch.inf)
    together = readers.queries.shape[1] * group
    numbers = (together + selection.group * rank) * width + together * selection.group * rank
    count = max(1, numbers_at_once(queries) // numbers)
    for start in range(0, len(readers.items), count):
        some = readers.some(slice(start, start + count))
        products = rows[some.queries].flatten(1, 2) @ keys[at[some.items]].flatten(1, 2).transpose(-1, -2)
        products = (products * width**-0.5).unflatten(2, (selection.group, rank))
        of_heads = reduced(products, selection.score).unflatten(1, (-1, group))
        scores[some.pairs] = of_heads.amax(2)
    return scores[:-1].view(*lists.shape, selection.group)


def places_of_all(places: Tensor, landmarks: Tensor) -> Tensor:
    """`places` (B, Z, g) of blocks among those (B, H_kv, S) of all key heads, (B H_kv Z, g); any of a missing one."""
    batch, kv_heads, count = landmarks.shape[:3]
    sequences = torch.arange(batch * kv_heads, device=places.device).view(batch, kv_heads, 1, 1)
    return (places.clamp(min=0)[:, None] + sequences * count).flatten(0, 2)


class Choice(NamedTuple):
    """How a backend chooses."""

    among_all: Callable[[Tensor, Landmarks, LandmarkVisibility, SelectionRule], Tensor]
    list_scorer: Callable[[Tensor, Landmarks, SelectionRule], ListScorer]
    largest: Callable[[Tensor, Tensor, int], Tensor]


ON_ANY_DEVICE = Choice(choose_among_all, list_scorer, largest)
