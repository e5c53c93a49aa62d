"""Landmarks that stand for complete blocks, and who sees them."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions, position_rows, window_reach
from megakernel.ops.window import Layout, cut

MISSING = -(2**62)
"""The end of a block that does not exist."""


class Landmarks(NamedTuple):
    """S blocks of r landmarks each."""

    keys: Tensor
    """(B, H_kv, S, r, d), or M d where M keys stand at a landmark."""

    values: Tensor
    """(B, H_kv, S, r, D)"""

    ends: Tensor
    """(B, S) int64: place of a block's last token, counted from the first token of this shard; or MISSING."""

    def moved(self, places: int) -> "Landmarks":
        """The same landmarks for a shard that begins `places` later."""
        return self._replace(ends=torch.where(self.ends == MISSING, MISSING, self.ends - places))

    def after(self, other: "Landmarks | None") -> "Landmarks":
        """`other` and these."""
        if other is None:
            return self
        keys, values = (torch.cat(both, 2) for both in zip(other[:2], self[:2]))
        return Landmarks(keys, values, torch.cat([other.ends.expand(len(keys), -1), self._ends()], 1))

    def existing(self) -> "Landmarks":
        """Without the blocks that no row has."""
        some = (self.ends != MISSING).any(0)
        return Landmarks(self.keys[:, :, some], self.values[:, :, some], self._ends()[:, some])

    def _ends(self) -> Tensor:
        return self.ends.expand(len(self.keys), -1)


class Blocks(NamedTuple):
    """The blocks of a document that are complete at the end of each stretch of b tokens."""

    layout: Layout
    ends: Tensor
    """(B, S) as in Landmarks."""

    start: Tensor
    """(B, S): place of the block's first token in its window."""

    def last_positions(self) -> Tensor:
        """(B, S): position of the block's last token in its document; anything where there is none."""
        at = self.start - self.layout.halo + self.layout.block_size - 1
        return self.layout.places.gather(-1, at[..., None])[..., 0]

    def of(self, before: Tensor, x: Tensor) -> Tensor:
        """(B, H, tail, d) and (B, H, N, d) -> (B, H, S, b, d), the tokens of each block."""
        windows = self.layout.windows(before, x)
        if self.layout.aligned:
            return windows
        inside = torch.arange(self.layout.block_size, device=x.device)
        index = (self.start[..., None] + inside).clamp(min=0)[:, None, :, :, None]
        return windows.gather(3, index.expand(*windows.shape[:3], -1, windows.shape[-1]))


def complete_blocks(positions: Positions, length: int, device: torch.device, size: int) -> Blocks:
    """Where blocks of `size` tokens end among `length` tokens, one at most in every stretch of `size`."""
    layout = cut(positions, length, device, block_size=size, blocks=1)
    ended = layout.block_ends()
    at = ended.int().argmax(-1)
    places = at + torch.arange(at.shape[1], device=device) * layout.size
    return Blocks(layout, torch.where(ended.any(-1), places, MISSING), layout.halo + at - size + 1)


class Sight(NamedTuple):
    """What each query sees of landmarks: blocks of its own document that end before a place."""

    first: Tensor
    """(B, N): place of the first token of the query's document."""

    limit: Tensor
    """(B, N): blocks end before it."""

    def visible(self, ends: Tensor, rank: int) -> Tensor:
        """(B, N, S r) bool."""
        seen = (ends[:, None] >= self.first[..., None]) & (ends[:, None] < self.limit[..., None])
        return seen.repeat_interleave(rank, -1)


def sight(positions: Positions, length: int, device: torch.device, *, size: int, skipped: int) -> Sight:
    """Queries see blocks that end before their current block of `size` tokens and the `skipped` - 1 before it."""
    rows = position_rows(positions, length, device)
    places = torch.arange(length, device=device)
    return Sight(places - rows, places - window_reach(rows, size, skipped))
