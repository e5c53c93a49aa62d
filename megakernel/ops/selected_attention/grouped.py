"""The choice in two levels: the best groups of blocks first, then the best blocks of these groups.

A group is `SelectionRule.group` consecutive blocks of a document, the first ones from its start. Blocks after the last
group that is complete before a query's window are always scored. Up to k groups, two levels choose as one does.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.landmark_attention import MISSING, Landmarks, LandmarkVisibility, complete_blocks
from megakernel.ops.selected_attention.choice import ON_ANY_DEVICE, Choice, ListScorer
from megakernel.ops.selected_attention.inputs import NONE, SelectionRule

ROWS = 8192
"""Queries of a head whose scores are in memory at once."""


@torch.no_grad()
def completed_groups(
    landmarks: Landmarks, positions: Positions, length: int, selection: SelectionRule
) -> Landmarks | None:
    """The groups that end among the last `length` tokens; None if no group can.

    landmarks: of the blocks of these and of all earlier tokens of the sequence.
    """
    if isinstance(positions, int) and (positions + length) // selection.span == positions // selection.span:
        return None
    ends = complete_blocks(positions, length, landmarks.ends.device, selection.span).ends
    return _groups_with(landmarks, ends.expand(len(landmarks.keys), -1), selection)


@torch.no_grad()
def groups_before(landmarks: Landmarks, first: Tensor, selection: SelectionRule) -> Landmarks:
    """The complete groups before a shard, of the document of its first token, which has the position `first` (B,)."""
    count = landmarks.ends.shape[1] * selection.block_size // selection.span
    last = selection.span * torch.arange(1, count + 1, device=first.device) - 1
    ends = torch.where(last < first[:, None], last - first[:, None], MISSING)
    return _groups_with(landmarks, ends, selection)


def no_group(landmarks: Landmarks, selection: SelectionRule) -> Landmarks:
    """One place without a group, for blocks with these landmarks: states have the same tensors at every length."""
    batch, kv_heads, _, rank, width = landmarks.keys.shape
    keys = landmarks.keys.new_zeros(batch, kv_heads, 1, min(rank, selection.group), width)
    ends = torch.full((batch, 1), MISSING, device=keys.device)
    return Landmarks(keys, keys[..., :0], ends)


def _groups_with(landmarks: Landmarks, ends: Tensor, selection: SelectionRule) -> Landmarks:
    """Landmarks (B, H_kv, Z, r, d) of groups: means of equal parts of their blocks, over all landmarks of a block.

    ends: (B, Z), as those of blocks. A group has at most one landmark per block.
    """
    places = _places(landmarks.ends, _block_ends(ends, selection))
    rank = min(landmarks.keys.shape[3], selection.group)
    means = landmarks.keys.mean(3)
    index = places.clamp(min=0).flatten(1)[:, None, :, None].expand(-1, means.shape[1], -1, means.shape[-1])
    blocks = means.gather(2, index).unflatten(2, (-1, selection.group))
    bounds = [-(-i * selection.group // rank) for i in range(rank + 1)]
    keys = torch.stack([blocks[:, :, :, slice(*part)].mean(3) for part in pairwise(bounds)], 3)
    return Landmarks(keys, keys[..., :0], ends)


def _block_ends(ends: Tensor, selection: SelectionRule) -> Tensor:
    """Ends (B, Z, g) of the blocks of groups with the ends (B, Z)."""
    back = torch.arange(selection.group - 1, -1, -1, device=ends.device) * selection.block_size
    # No block has the end before MISSING.
    return torch.where(ends[..., None] == MISSING, MISSING - 1, ends[..., None] - back)


def _places(ends: Tensor, wanted: Tensor) -> Tensor:
    """Places (B, ...) of the blocks with the ends `wanted` (B, ...) among those with `ends` (B, S); NONE if missing."""
    ends = ends.expand(len(wanted), -1)
    # Ascending but for missing blocks, which repeat the end before theirs, and so are never the first with it.
    ascending = ends.cummax(1).values
    rows = wanted.flatten(1).contiguous()
    place = torch.searchsorted(ascending, rows).clamp(max=ends.shape[1] - 1)
    found = ends.gather(1, place) == rows
    return torch.where(found, place, NONE).view(wanted.shape)


@torch.no_grad()
def choose(
    queries: Tensor,
    landmarks: Landmarks,
    groups: Landmarks | None,
    visibility: LandmarkVisibility,
    selection: SelectionRule,
    how: Choice = ON_ANY_DEVICE,
) -> Tensor:
    """Indices (B, H_kv, n, min(k, S)) int64 of the blocks that n tokens choose, or NONE; see `choose_among_all`."""
    if groups is None or groups.ends.shape[1] <= selection.chosen:
        return how.among_all(queries, landmarks, visibility, selection)
    landmarks = landmarks._replace(ends=landmarks.ends.expand(len(queries), -1))
    places = _places(landmarks.ends, _block_ends(groups.ends, selection))
    score_lists = how.list_scorer(queries, landmarks, selection)
    chosen = []
    for start in range(0, queries.shape[3], ROWS):
        rows = slice(start, start + ROWS)
        visible = LandmarkVisibility(*(x[:, rows] for x in visibility))
        some = queries[:, :, :, rows]
        chosen.append(_choose(some, landmarks, groups, places, visible, selection, how, score_lists))
    found = torch.cat(chosen, 2)
    count = min(selection.chosen, landmarks.ends.shape[1])
    return F.pad(found, (0, count - found.shape[-1]), value=NONE)


def _choose(
    queries: Tensor,
    landmarks: Landmarks,
    groups: Landmarks,
    group_places: Tensor,
    visibility: LandmarkVisibility,
    selection: SelectionRule,
    how: Choice,
    score_lists: ListScorer,
) -> Tensor:
    """group_places: (B, Z, g), of the blocks of the complete groups."""
    size, span = selection.block_size, selection.span
    number, device = groups.ends.shape[1], queries.device
    first, limit = (x.expand(len(queries), -1) for x in visibility)
    begin = first + (limit - first).clamp(min=0) // span * span
    best = how.among_all(queries, groups, LandmarkVisibility(first, begin), selection)

    # Tokens one after the other share the group that is not complete, and it begins anew at most once in a block.
    has_rest = limit > begin
    before = F.pad(begin[:, :-1], (1, 0), value=MISSING), F.pad(has_rest[:, :-1], (1, 0))
    new = has_rest & ((begin != before[0]) | ~before[1])
    of_rest = torch.where(has_rest, new.cumsum(1) - 1, NONE)
    rests = begin.shape[1] if selection.unit == "tile" else begin.shape[1] // size + 1
    ends = begin.new_full((len(begin), rests + 1), MISSING)
    last = begin + span - 1
    ends = ends.scatter_(1, torch.where(has_rest, of_rest, rests), last)[:, :rests]
    places = torch.cat([group_places, _places(landmarks.ends, _block_ends(ends, selection))], 1)

    rest = torch.where(has_rest, number + of_rest, NONE)[:, None, :, None].expand(*best.shape[:3], 1)
    lists = torch.cat([best, rest], 3)
    scores = score_lists(queries, places, lists)
    complete = (best != NONE)[..., None].expand(*best.shape, selection.group)
    inside = torch.arange(selection.group, device=device) < ((limit - begin) // size)[..., None]
    inside = inside[:, None, :, None].expand(-1, best.shape[1], -1, -1, -1)
    visible = torch.cat([complete, inside], 3)
    found = how.largest(scores.flatten(3), visible.flatten(3), selection.chosen)
    at = found.clamp(min=0)
    item = lists.gather(3, at // selection.group).clamp(min=0)
    index = (item * selection.group + at % selection.group).flatten(1)
    return torch.where(found == NONE, NONE, places.flatten(1).gather(1, index).view(found.shape))
