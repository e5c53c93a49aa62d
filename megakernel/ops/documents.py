"""Packed documents, described by the position of each token within its own document.

A document starts where the position is 0, and began before the sequence if the position exceeds the token's index in
the sequence. `window_reach` and `ends_block` define its blocks.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Positions = Tensor | int
"""(B, N) positions, or the position of the first token of sequences with one document each."""

Made = TypeVar("Made")


class _CacheEntry(NamedTuple):
    """Values computed from one tensor of positions."""

    positions: "weakref.ref[Tensor]"
    version: int
    values: dict[Hashable, Any]


_cache: list[_CacheEntry] = []
"""The last three tensors of positions: a shard's, with those before it, and of the whole sequences."""


def cached_for_positions(positions: Tensor, name: Hashable, make: Callable[[Tensor], Made]) -> Made:
    """`make(positions)`, cached so that all layers of a micro-batch, which get the same tensor, share it.

    name: key of the value, with all else that it depends on. The cache holds three tensors of positions, and drops
    those that are modified or freed. It is bypassed in compiled or captured graphs, which may run on other positions,
    and in inference mode, whose tensors training could not use.
    """
    if is_graph(positions) or torch.is_inference_mode_enabled() or positions.is_inference():
        return make(positions)
    version = positions._version
    for entry in _cache:
        if entry.positions() is positions and entry.version == version:
            break
    else:
        entry = _CacheEntry(weakref.ref(positions, _evict), version, {})
        _cache[:] = [entry, *_cache[:2]]
    if name not in entry.values:
        entry.values[name] = make(positions)
    return entry.values[name]


def _evict(freed: "weakref.ref[Tensor]") -> None:
    _cache[:] = [entry for entry in _cache if entry.positions is not freed]


def is_graph(x: Tensor) -> bool:
    """Whether operations on `x` become a compiled or captured graph, in which its values cannot be read."""
    if torch.compiler.is_compiling():
        return True
    return x.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def positions_from_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Positions (B, N) from document starts in the flattened B * N tokens.

    If a sequence does not begin with a start, it continues the previous document: positions exceed the token index.
    """
    indices = torch.arange(batch * length, device=cu_seqlens.device)
    # Start -1 stands for a document that began earlier, for tokens before the first listed start.
    starts = torch.cat([cu_seqlens.new_full((1,), -1), cu_seqlens[:-1]]).long()
    document = torch.searchsorted(starts, indices, right=True) - 1
    return (indices - starts[document]).view(batch, length)


def cu_seqlens_from_positions(positions: Tensor) -> Tensor:
    """Document starts in the flattened tokens of positions (B, N), followed by B * N; int32.

    No document crosses sequences, and padding (-1) is a document of its own. Synchronizes with the GPU for the count.
    """
    begins = (positions == 0) | ((positions < 0) & (positions.roll(1, 1) >= 0))
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    return torch.cat([starts, starts.new_full((1,), positions.numel())])


def token_positions(positions: Positions, length: int, device: torch.device) -> Tensor:
    """Positions (B, N), or (1, N) int64 if they are the same in all sequences."""
    if isinstance(positions, int):
        return torch.arange(positions, positions + length, device=device)[None]
    return positions


def collapse_positions(positions: Tensor) -> Positions:
    """Positions (B, N) as one int if each sequence has one document and all start at the same position.

    Ops then need no masks. Positions on a GPU are returned unchanged: reading them would synchronize.
    """
    if positions.device.type != "cpu" or torch.compiler.is_compiling():
        return positions
    first, *others = positions[:, 0].tolist()
    if any(other != first for other in others):
        return positions
    length = positions.shape[1]
    if length > 1 and not bool((positions == torch.arange(first, first + length)).all()):
        return positions
    return int(first)


def window_reach(positions: Tensor, block_size: int, blocks: int) -> Tensor:
    """Number of earlier tokens in a token's window: its current block of the document and the `blocks` - 1 before.

    Blocks restart at every document: a position is in block position // block_size.
    """
    return torch.minimum(positions, positions % block_size + (blocks - 1) * block_size)


def sees_far(positions: Tensor, block_size: int, blocks: int) -> Tensor:
    """Whether there is a block before the token's window of `blocks`, so that the token sees landmarks."""
    return positions >= block_size * blocks


def ends_block(positions: Tensor, block_size: int, blocks: int) -> Tensor:
    """Whether the token ends its block, and the first block of its window of `blocks` is complete."""
    return (positions % block_size == block_size - 1) & (positions >= block_size * blocks - 1)


def pad_positions(positions: Tensor, count: int) -> Tensor:
    """Positions extended by `count` tokens of the last document."""
    more = torch.arange(1, count + 1, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + more], 1)


def positions_with_halo(positions: Positions, count: int, q: Tensor, *, is_first: bool) -> Positions:
    """Positions (B, count + N) of a shard's queries q (B, H, N, d) and of the `count` tokens before them.

    is_first: there are none before this shard. Tokens before its first document count as documents of their own.
    """
    if isinstance(positions, int) and not is_first:
        return positions - count

    def extended(of_shard: Tensor) -> Tensor:
        if is_first:  # a document may begin before the sequence
            of_shard = of_shard.minimum(torch.arange(q.shape[2], device=q.device))
        before = torch.arange(-count, 0, device=q.device)
        at = of_shard[:, :1] + before
        return torch.cat([torch.where(at < 0, before + count, at), of_shard], 1)

    if isinstance(positions, int):
        return extended(token_positions(positions, q.shape[2], q.device).expand(len(q), -1))
    return cached_for_positions(positions, (positions_with_halo, count, is_first), extended)


def began_before(positions: Positions, length: int, device: torch.device) -> Tensor:
    """(B, N) or (1, N) bool: whether the token's document began before the sequence."""
    return token_positions(positions, length, device) > torch.arange(length, device=device)


def open_documents(positions: Positions, length: int, batch: int, device: torch.device) -> Tensor:
    """(B,) bool: whether no document starts inside the sequence, so that an incoming state also leaves it."""
    if isinstance(positions, int):
        return torch.full((batch,), positions > 0, device=device)
    return positions[:, -1] >= length


def carry_factor(positions: Positions, tokens: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Factor of the incoming state over tokens (B, H, N, ...): (B,) bool, see `open_documents`.

    With log_decay (B, H_kv, N), the decay factor (B, H_kv), 0 if a document starts inside.
    """
    carries = open_documents(positions, tokens.shape[2], len(tokens), tokens.device)
    return carries if log_decay is None else torch.where(carries[:, None], log_decay.sum(2).exp(), 0.0)


def reversed_positions(positions: Tensor, continued: bool = False) -> Tensor:
    """Positions (B, N) of the reversed sequences.

    continued: take the last document of each sequence as N tokens longer, so that its reverse begins before it.
    """
    length = positions.shape[1]
    indices = torch.arange(length, device=positions.device)
    end = 2 * length if continued else length
    starts = torch.where(positions == 0, indices, end)
    following = torch.cat([starts[:, 1:], starts.new_full((len(starts), 1), end)], 1)
    ends = following.flip(1).cummin(1).values.flip(1)
    return (ends - 1 - indices).flip(1)
