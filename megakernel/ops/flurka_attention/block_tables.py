"""Tables of FLuRKA's documents, windows and block ends for its kernels.

A sequence is split into chunks of b tokens at fixed places. Ends of complete blocks are at least b apart, so a chunk
has at most one. There, a block leaves the window of all later tokens, and its landmarks enter the far part. If the
blocks coincide with the chunks (`aligned`), kernels compute all this, and the tables are None.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions, cached_for_positions, ends_block, window_reach


class BlockTables(NamedTuple):
    """Tables of a call, all int32. Places count from the first token and are negative in the tail before it."""

    starts: Tensor | None
    """(B, N): where each token's document starts, negative before the sequence; None if all tokens share one."""

    start: int
    """The start of that one document."""

    windows: Tensor | None
    """(B, N): the first token of each token's window; None if aligned."""

    ends: Tensor | None
    """(B, chunks): where a block with a complete window ends, -1 for none; None if aligned."""

    before: int
    """Tokens of the tail at the front of keys and values."""

    oldest: int
    """The first place of the open document that has a key, at most 0."""


def block_tables(positions: Positions, q: Tensor, *, block_size: int, blocks: int, tail: bool) -> BlockTables:
    """The tables for queries q (B, H, N, d). tail: whether keys before the sequence are available."""
    batch, _, length, _ = q.shape
    reach = block_size * blocks
    if isinstance(positions, int):
        start = -positions
        aligned = positions % block_size == 0
        # Aligned sequences with windows of one block see no token before them.
        before = reach if tail and positions > 0 and not (aligned and blocks == 1) else 0
        oldest = -min(positions, before)
        if aligned:
            return BlockTables(None, start, None, None, before, oldest)
        positions = torch.arange(positions, positions + length, device=q.device).expand(batch, -1)
        return BlockTables(
            None, start, *_windows_and_ends(positions, block_size, blocks, before), before, oldest
        )
    before = reach if tail else 0

    def of_documents(positions: Tensor) -> BlockTables:
        starts = (_places(positions) - positions).to(torch.int32)
        return BlockTables(
            starts, 0, *_windows_and_ends(positions, block_size, blocks, before), before, -before
        )

    return cached_for_positions(positions, (block_tables, block_size, blocks, before), of_documents)


def ends_of_blocks(ends: Tensor | None, length: int, block_size: int, device: torch.device) -> Tensor:
    """`BlockTables.ends`, or for aligned sequences (None) an equivalent (1, chunks); the last chunk may be partial."""
    if ends is not None:
        return ends
    ends = torch.arange(block_size - 1, length + block_size - 1, block_size, device=device, dtype=torch.int32)
    return torch.where(ends < length, ends, -1)[None]


def _places(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[1], device=positions.device)


def _windows_and_ends(positions: Tensor, block_size: int, blocks: int, before: int) -> tuple[Tensor, Tensor]:
    places, length = _places(positions), positions.shape[1]
    windows = (places - window_reach(positions, block_size, blocks)).clamp(min=-before)
    complete = ends_block(positions, block_size, blocks) & (places - block_size * blocks + 1 >= -before)
    ends = torch.where(complete, places, -1)
    ends = torch.nn.functional.pad(ends, (0, -length % block_size), value=-1)
    return windows.to(torch.int32).contiguous(), ends.unflatten(1, (-1, block_size)).amax(2).to(torch.int32)
