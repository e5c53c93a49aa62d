"""Landmarks of the blocks of packed documents: E x of every block, wherever its document begins (docs/formulas.md, 3).

A sequence is split into chunks at fixed places. The ends of complete blocks are at least b tokens apart, so a chunk has
at most one, and its landmarks have r fixed places: shapes do not depend on where documents begin. A chunk without a
block's end has landmarks that nobody may see.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.arguments import check_positions, check_tokens
from megakernel.ops.chunks import chunk_keys
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import (
    Positions,
    cached_for_positions,
    ends_block,
    pad_positions,
    token_positions,
)
from megakernel.ops.low_rank import compress, pooled_product
from megakernel.ops.tensors import accum_dtype


class BlockEnds(NamedTuple):
    """Where blocks of b tokens end in N tokens, in C chunks of `size` tokens. B is 1 if all sequences are alike."""

    positions: Tensor
    """(B, C, size), of the tokens in their documents; those after the N tokens continue the last document."""

    place: Tensor
    """(B, C): index in its chunk of the token that ends a block; 0 for none."""

    exists: Tensor
    """(B, C) bool: whether there is such a token."""

    @property
    def size(self) -> int:
        """Tokens of a chunk: b, or N if that is less."""
        return self.positions.shape[2]


def chunk_count(length: int, block_size: int) -> int:
    """C, the chunks of `length` tokens."""
    return -(-length // block_size)


def block_ends(positions: Positions, length: int, block_size: int, device: torch.device) -> BlockEnds:
    """The ends of the blocks of `length` tokens."""

    def of_tokens(positions: Tensor) -> BlockEnds:
        size = min(block_size, length)
        padded = pad_positions(positions, -length % size)
        ends = ends_block(padded, block_size, 1)
        ends[:, length:] = False
        ends = ends.unflatten(1, (-1, size))
        return BlockEnds(padded.unflatten(1, (-1, size)), ends.int().argmax(-1), ends.any(-1))

    if isinstance(positions, int):
        return of_tokens(token_positions(positions, length, device))
    return cached_for_positions(positions, (block_ends, block_size, length), of_tokens)


def pool_blocks(
    x: Tensor,
    pool: Tensor,
    *,
    positions: Positions = 0,
    entering: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Landmarks E x of the blocks that end among N tokens.

    Args:
        x: (B, H, N, c) tokens.
        pool: E, (r, b) or (H, r, b).
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one.
        entering: (B, H, r, c), what `pool_open_block` returned for the tokens before; None: zeros.
        backend: reference or chunked.

    Returns:
        (B, H, C r, c) with C = ceil(N / b), in float32 or better. Landmarks of a chunk in which no block ends
        (`BlockEnds.exists`) have no meaning.

    Raises:
        ValueError: another shape of x, `entering` or positions.
    """
    _check(x, pool, positions, entering)
    return choose(IMPLEMENTATIONS, backend)(x, pool, positions, entering)


def pool_open_block(
    x: Tensor, pool: Tensor, *, positions: Positions = 0, entering: Tensor | None = None
) -> Tensor:
    """The sum E x over the tokens so far of the block that the last of N tokens is in; 0 if it ends the block.

    Arguments as in `pool_blocks`, to which this is `entering` for the next tokens. Returns (B, H, r, c), in float32 or
    better.
    """
    _check(x, pool, positions, entering)
    length, block_size = x.shape[2], pool.shape[-1]
    at = token_positions(positions, length, x.device)
    count = (at[:, -1:] + 1) % block_size
    tokens = min(length, max(block_size - 1, 1))
    inside = torch.arange(length - tokens, length, device=x.device) >= length - count
    columns = _columns(pool, at[:, length - tokens :]) * inside[:, None, None].to(pool.dtype)
    added = pooled_product(columns, x[:, :, length - tokens :])
    if entering is None:
        return added
    return added + torch.where((count > length)[:, None, None], entering.to(added.dtype), 0.0)


def _check(x: Tensor, pool: Tensor, positions: Positions, entering: Tensor | None) -> None:
    check_tokens("x", x)
    check_positions(positions, x)
    expected = (*x.shape[:2], pool.shape[-2], x.shape[3])
    if entering is not None and tuple(entering.shape) != expected:
        raise ValueError(f"entering has shape {tuple(entering.shape)}; expected {expected}")


def chunked(x: Tensor, pool: Tensor, positions: Positions, entering: Tensor | None) -> Tensor:
    """Products per chunk: a block has tokens of the chunk in which it ends, and of the one before."""
    length, block_size = x.shape[2], pool.shape[-1]
    if isinstance(positions, int) and positions % block_size == 0:
        return compress(x, pool)
    return _of_chunks(x, pool, block_ends(positions, length, block_size, x.device), entering)


def _of_chunks(x: Tensor, pool: Tensor, ends: BlockEnds, entering: Tensor | None) -> Tensor:
    block_size, size, chunks = pool.shape[-1], ends.size, ends.place.shape[1]
    rank, device = pool.shape[-2], x.device
    inside = torch.arange(size, device=device)
    end = torch.where(ends.exists, ends.place, -1)[..., None]
    of_end = (inside <= end) & (inside > end - block_size)
    # In the places of this chunk, the block that ends in the next one. Only a single chunk is shorter than a block.
    following = F.pad(end[:, 1:], (0, 0, 0, 1), value=-1)
    of_next = (following >= 0) & (inside > following + size - block_size)
    columns = _columns(pool, ends.positions)
    masks = torch.stack([of_end, of_next], 2)[:, None, :, :, None]
    factors = (columns[:, :, :, None] * masks.to(columns.dtype)).flatten(3, 4)
    both = pooled_product(factors, chunk_keys(x, size, chunks))
    before = both[:, :, :-1, rank:]
    began_before = (ends.exists & (ends.place < block_size - 1))[:, None, :1, None, None]
    # Zeros if nothing enters: the first chunk has no other chunk before it.
    first = both.new_zeros(()) if entering is None else entering[:, :, None].to(both.dtype)
    first = torch.where(began_before, first, 0.0).expand(*both.shape[:2], 1, rank, both.shape[4])
    return (both[:, :, :, :rank] + torch.cat([first, before], 2)).flatten(2, 3)


def _columns(pool: Tensor, positions: Tensor) -> Tensor:
    """The columns of E for tokens at positions (B, ..., n): (B, 1 or H, ..., r, n)."""
    # A product, because the gradient of an index adds in any order on a GPU.
    own = (
        torch.arange(pool.shape[-1], device=positions.device)[:, None]
        == positions[..., None, :] % pool.shape[-1]
    )
    matrix = pool.reshape(-1, *[1] * (positions.dim() - 2), *pool.shape[-2:])
    return matrix @ own[:, None].to(pool.dtype)


def reference(x: Tensor, pool: Tensor, positions: Positions, entering: Tensor | None) -> Tensor:
    """From the formula: every block from its tokens, in float64."""
    (batch, heads, length, width), (rank, block_size) = x.shape, pool.shape[-2:]
    at = token_positions(positions, length, x.device).expand(batch, -1).tolist()
    chunks, matrices, exact = chunk_count(length, block_size), pool.double().expand(heads, -1, -1), x.double()
    rows = []
    for row, places in enumerate(at):
        landmarks = [exact.new_zeros(heads, rank, width)] * chunks
        for place, position in enumerate(places):
            if position < 0 or position % block_size != block_size - 1:
                continue
            begin = place + 1 - block_size
            block = matrices[:, :, max(0, -begin) :] @ exact[row, :, max(0, begin) : place + 1]
            if begin < 0 and entering is not None:
                block = block + entering[row].double()
            landmarks[place // min(block_size, length)] = block
        rows.append(torch.cat(landmarks, 1))
    return torch.stack(rows).to(accum_dtype(x.dtype))


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
