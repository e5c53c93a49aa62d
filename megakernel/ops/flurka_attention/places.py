"""Where blocks of FLuRKA lie in a sequence, as its kernels take it.

A sequence is cut into chunks of b tokens at fixed places. Ends of complete blocks are at least b apart, so at most one
lies in a chunk; where it lies, the landmarks of the block that leaves the window of all later tokens enter the far
part. Where blocks are the chunks of a sequence (`aligned`), kernels know all this by arithmetic, and tables stay None.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions, ends_block, made_once, window_reach


class Places(NamedTuple):
    """Tables of a call, all int32; places count from the first token, and are negative in the tail before it."""

    starts: Tensor | None
    """(B, N): where each token's document starts, negative before the sequence; None where all tokens are of one."""

    start: int
    """That of the one document."""

    windows: Tensor | None
    """(B, N): the first token of each token's window; None where aligned."""

    ends: Tensor | None
    """(B, chunks): where a block ends whose window is complete, -1 in chunks without; None where aligned."""

    before: int
    """Tokens of the tail that keys and values begin with."""

    oldest: int
    """The first place of the open document that there is a key of, at most 0."""


def places_of(positions: Positions, q: Tensor, *, block_size: int, blocks: int, tail: bool) -> Places:
    """The places of the tokens q (B, H, N, d); `tail`: tokens before the sequence are at hand."""
    batch, _, length, _ = q.shape
    reach = block_size * blocks
    if isinstance(positions, int):
        start = -positions
        aligned = positions % block_size == 0
        # An aligned sequence of windows of one block sees no token before it.
        before = reach if tail and positions > 0 and not (aligned and blocks == 1) else 0
        oldest = -min(positions, before)
        if aligned:
            return Places(None, start, None, None, before, oldest)
        positions = torch.arange(positions, positions + length, device=q.device).expand(batch, -1)
        return Places(None, start, *_tables(positions, block_size, blocks, before), before, oldest)
    before = reach if tail else 0

    def of_documents(positions: Tensor) -> Places:
        starts = (_tokens(positions) - positions).to(torch.int32)
        return Places(starts, 0, *_tables(positions, block_size, blocks, before), before, -before)

    return made_once(positions, (places_of, block_size, blocks, before), of_documents)


def ends_of_blocks(ends: Tensor | None, length: int, block_size: int, device: torch.device) -> Tensor:
    """`Places.ends`, also where it is None: (1, chunks) of sequences aligned, whose last chunk may be cut short."""
    if ends is not None:
        return ends
    ends = torch.arange(block_size - 1, length + block_size - 1, block_size, device=device, dtype=torch.int32)
    return torch.where(ends < length, ends, -1)[None]


def _tokens(positions: Tensor) -> Tensor:
    return torch.arange(positions.shape[1], device=positions.device)


def _tables(positions: Tensor, block_size: int, blocks: int, before: int) -> tuple[Tensor, Tensor]:
    """Windows and ends."""
    places, length = _tokens(positions), positions.shape[1]
    windows = (places - window_reach(positions, block_size, blocks)).clamp(min=-before)
    whole = ends_block(positions, block_size, blocks) & (places - block_size * blocks + 1 >= -before)
    ends = torch.where(whole, places, -1)
    ends = torch.nn.functional.pad(ends, (0, -length % block_size), value=-1)
    return windows.to(torch.int32).contiguous(), ends.unflatten(1, (-1, block_size)).amax(2).to(torch.int32)
