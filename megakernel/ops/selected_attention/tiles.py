"""What every query reads: its window, and the blocks that its tile or the query itself has chosen."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.chunks import chunk_queries
from megakernel.ops.documents import window_reach
from megakernel.ops.landmark_attention import MISSING, Landmarks, LandmarkVisibility, landmark_visibility
from megakernel.ops.selected_attention.choice import ON_ANY_DEVICE, Choice
from megakernel.ops.selected_attention.grouped import choose
from megakernel.ops.selected_attention.inputs import NONE, SelectedInputs, SelectionRule
from megakernel.ops.window import WindowLayout, window_layout


class BlockReads(NamedTuple):
    """Which blocks of some keys queries read."""

    lists: Tensor
    """(B, H_kv, n, k') int64: numbers of blocks, or NONE."""

    starts: Tensor
    """(B, S) int64: index of each block's first key."""

    block_size: int


class Tiles(NamedTuple):
    """C tiles of L tokens, one after the other whatever the documents, and T keys, of which the last are theirs."""

    selection: SelectionRule
    layout: WindowLayout

    total: int
    """T."""

    ends: Tensor
    """(B, S) int64: `Landmarks.ends` of the S blocks."""

    own: Tensor
    """(B, H_kv, C, k'), int64: blocks chosen by the token of the tile that begins a block, or NONE. With unit `token`:
    (B, H_kv, C L, k'), those of every token."""

    before: Tensor
    """(B, H_kv, C, k'): those of the tile before, which tokens read whose block began there."""

    from_own: Tensor
    """(B, C, L) bool: whether a token's block begins in its own tile."""

    sees: Tensor
    """(B, C, L) bool: whether there is a block before the token's window."""

    @property
    def cached(self) -> int:
        """Keys before the first token."""
        return self.total - self.layout.length

    @property
    def number(self) -> int:
        """C."""
        return self.layout.positions.shape[1]

    @property
    def keys_of_query(self) -> int:
        """Keys of the window of a tile, and of the blocks that a query chooses."""
        return self.layout.halo + self.layout.size + self.own.shape[-1] * self.selection.block_size

    def reads(self, queries: int, source: int = 0, rank: int = 0) -> BlockReads:
        """What the first `queries` of shard `rank`, this one, read in shard `source`, which is not after it.

        The S blocks are those of all shards up to this one, of which each has as many, and as many keys, T.
        """
        lists, starts = self.of_queries(slice(0, queries)), self.starts
        if rank:
            count = self.ends.shape[1] // (rank + 1)
            first, end = source * count, (source + 1) * count
            lists = torch.where((lists >= first) & (lists < end), lists - first, NONE)
            starts = self._starts(self.ends[:, first:end] + (rank - source) * self.layout.length)
        return BlockReads(lists, starts, self.selection.block_size)

    def of_queries(self, queries: slice) -> Tensor:
        """(B, H_kv, n, k') int64: blocks that each of these tokens reads, or NONE."""
        if self.selection.unit == "token":
            return self.own[:, :, queries]
        size = self.layout.size
        tile = torch.arange(queries.start, queries.stop, device=self.own.device) // size
        from_own, sees = (x.flatten(1)[:, None, queries, None] for x in (self.from_own, self.sees))
        chosen = torch.where(from_own, self.own[:, :, tile], self.before[:, :, tile])
        return chosen.masked_fill(~sees, NONE)

    def windows(self, tiles: slice) -> tuple[Tensor, Tensor]:
        """Indices (C, W) of the keys of the tiles' windows, and (B, C, L, W) bool: whether the query sees the key."""
        size, halo = self.layout.size, self.layout.halo
        device = self.own.device
        first = self.cached - halo + size * torch.arange(tiles.start, tiles.stop, device=device)
        keys, queries = (
            torch.arange(halo + size, device=device),
            torch.arange(halo, halo + size, device=device),
        )
        reach = window_reach(self.layout.positions[:, tiles], self.selection.block_size, self.selection.near)
        visible = (keys <= queries[:, None]) & (keys >= (queries - reach)[..., None])
        return (first[:, None] + keys).clamp(max=self.total - 1), visible

    @property
    def starts(self) -> Tensor:
        """(B, S) int64: index of each block's first key, clamped for missing blocks."""
        return self._starts(self.ends)

    def _starts(self, ends: Tensor) -> Tensor:
        size = self.selection.block_size
        return (ends + self.cached - size + 1).clamp(min=0, max=self.total - size)

    def keys_of(self, indices: Tensor) -> Tensor:
        """Indices (B, H_kv, C, U b) of the keys of the blocks `indices` (B, H_kv, C, U)."""
        starts = self.starts[:, None, None].expand(*indices.shape[:3], -1).gather(-1, indices.clamp(min=0))
        return (starts[..., None] + torch.arange(self.selection.block_size, device=starts.device)).flatten(3)

    def last_choice(self, before: Tensor) -> Tensor:
        """`SelectedInputs.choice` after the last token; `before` if every token chooses for itself."""
        if self.selection.unit == "token":
            return before
        length = self.layout.length
        chosen = self.of_queries(slice(length - 1, length))[:, :, 0]
        ends = self.ends[:, None].expand(*chosen.shape[:2], -1).gather(-1, chosen.clamp(min=0))
        ends = torch.where(chosen == NONE, MISSING, ends - length)
        return F.pad(ends, (0, self.selection.chosen - ends.shape[-1]), value=MISSING)


def choose_for_tiles(q: Tensor, inputs: SelectedInputs, how: Choice = ON_ANY_DEVICE) -> Tiles:
    """Choose the blocks of all tiles of queries (B, H, N, d)."""
    selection, landmarks, groups = inputs.selection, inputs.landmarks, inputs.groups
    batch, length, size = len(q), q.shape[2], selection.block_size
    layout = window_layout(inputs.positions, length, q.device, block_size=size, blocks=selection.near)
    positions = layout.positions.expand(batch, -1, -1)
    total, ends = inputs.cache.keys.shape[2] + length, landmarks.ends.expand(batch, -1)
    sees = positions >= selection.reach
    from_own = torch.arange(layout.size, device=q.device) >= positions % size
    queries = chunk_queries(q, inputs.cache.keys.shape[1], layout.size, positions.shape[1])
    queries = queries.unflatten(3, (-1, layout.size)).transpose(2, 3)  # (B, H_kv, G, C, L, d)
    visibility = landmark_visibility(inputs.positions, length, q.device, size=size, skipped=selection.near)
    missing = positions[0].numel() - length
    visibility = LandmarkVisibility(*(F.pad(x, (0, missing)).expand(batch, -1) for x in visibility))
    if selection.unit == "token":
        own = choose(queries.flatten(3, 4), landmarks, groups, visibility, selection, how)
        return Tiles(selection, layout, total, ends, own, own, from_own, sees)
    if length == 1 and isinstance(inputs.positions, int) and inputs.positions % size:
        # Decoding: this token's tile has chosen before.
        before = _indices_of(inputs.choice, ends)[:, :, None, : ends.shape[1]]
        return Tiles(selection, layout, total, ends, before, before, from_own, sees)
    # Two tokens that begin a block and see earlier ones are at least b apart: at most one per tile.
    begins = (positions % size == 0) & sees
    at = begins.int().argmax(-1)
    index = at[:, None, None, :, None, None].expand(*queries.shape[:4], 1, queries.shape[-1])
    tokens = at + layout.size * torch.arange(at.shape[1], device=at.device)
    choosing = LandmarkVisibility(*(x.gather(1, tokens) for x in visibility))
    own = choose(queries.gather(4, index)[:, :, :, :, 0], landmarks, groups, choosing, selection, how)
    own = own.masked_fill(~begins.any(-1)[:, None, :, None], NONE)
    first = _indices_of(inputs.choice, ends)[..., : own.shape[-1]]
    before = torch.cat([first[:, :, None], own[:, :, :-1]], 2)
    return Tiles(selection, layout, total, ends, own, before, from_own, sees)


def choice_before(
    queries: Tensor,
    position: Tensor,
    landmarks: Landmarks,
    groups: Landmarks | None,
    selection: SelectionRule,
) -> Tensor:
    """`SelectedInputs.choice` of a shard, from queries (B, H, b, d), the last before it, and earlier landmarks.

    position: (B,) of the shard's first token in its document.
    """
    if selection.unit == "token":
        return landmarks.ends.new_empty(*landmarks.keys.shape[:2], 0)
    size, kv_heads = selection.block_size, landmarks.keys.shape[1]
    into = position % size
    at = (
        (size - into)
        .clamp(max=size - 1)[:, None, None, None]
        .expand(-1, queries.shape[1], 1, queries.shape[-1])
    )
    chooser = queries.gather(2, at).unflatten(1, (kv_heads, -1))
    first, limit = -position[:, None], (-into - (selection.near - 1) * size)[:, None]
    chosen = choose(chooser, landmarks, groups, LandmarkVisibility(first, limit), selection)[:, :, 0]
    ends = landmarks.ends.expand(len(queries), -1)[:, None].expand(*chosen.shape[:2], -1)
    ends = ends.gather(-1, chosen.clamp(min=0)).masked_fill(chosen == NONE, MISSING)
    return F.pad(ends, (0, selection.chosen - ends.shape[-1]), value=MISSING)


def _indices_of(choice: Tensor, ends: Tensor) -> Tensor:
    """Indices (B, H_kv, k) of the blocks with the ends `choice` among those with `ends` (B, S); NONE if missing."""
    equal = (choice[..., None] == ends[:, None, None]) & (choice != MISSING)[..., None]
    return torch.where(equal.any(-1), equal.int().argmax(-1), NONE)
