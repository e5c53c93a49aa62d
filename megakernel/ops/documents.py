"""Where documents lie inside sequences.

Everything an op needs to know about packing follows from the position of each token within its own document:
a document starts where the position is 0, began before the sequence where it exceeds the place in it, and
`window_reach` and `ends_block` say where its blocks lie.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Positions = Tensor | int
"""(B, N) positions, or the position of the first token of sequences that hold one document each."""

Made = TypeVar("Made")


class _Tables(NamedTuple):
    """What was made of some positions."""

    positions: "weakref.ref[Tensor]"
    version: int
    by_name: dict[Hashable, Any]


_tables: list[_Tables] = []
"""Of the positions that were asked about last: a shard's, and those of the whole sequences that they were made into."""


def made_once(positions: Tensor, name: Hashable, make: Callable[[Tensor], Made]) -> Made:
    """`make(positions)`, which the layers of a micro-batch, being handed one tensor, share.

    name: which of the things it is, and what else that depends on. It is kept until others are asked about, or the
    positions are changed or gone. A graph that is compiled or captured makes it anew, since it may be run on other
    positions, and so does inference mode, whose tensors training could not use.
    """
    if is_graph(positions) or torch.is_inference_mode_enabled() or positions.is_inference():
        return make(positions)
    version = positions._version
    for known in _tables:
        if known.positions() is positions and known.version == version:
            break
    else:
        known = _Tables(weakref.ref(positions, _forget), version, {})
        _tables[:] = [known, *_tables[:1]]
    if name not in known.by_name:
        known.by_name[name] = make(positions)
    return known.by_name[name]


def _forget(gone: "weakref.ref[Tensor]") -> None:
    _tables[:] = [known for known in _tables if known.positions is not gone]


def is_graph(x: Tensor) -> bool:
    """Whether what is done with `x` becomes a compiled or captured graph: nobody can look at its numbers."""
    if torch.compiler.is_compiling():
        return True
    return x.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def positions_from_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """Positions (B, N) from document starts in the flattened B * N tokens.

    A sequence whose first token is not a start continues what came before: its positions exceed the place in it.
    """
    places = torch.arange(batch * length, device=cu_seqlens.device)
    # A start before everything: sequences without a listed start of their own continue.
    starts = torch.cat([cu_seqlens.new_full((1,), -1), cu_seqlens[:-1]]).long()
    document = torch.searchsorted(starts, places, right=True) - 1
    return (places - starts[document]).view(batch, length)


def cu_seqlens_from_positions(positions: Tensor) -> Tensor:
    """Document starts in the flattened tokens of positions (B, N), and B * N at the end, int32.

    No document crosses sequences, and padding at -1 is one of its own. The host waits for a GPU, to know how many.
    """
    begins = (positions == 0) | ((positions < 0) & (positions.roll(1, 1) >= 0))
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0].to(torch.int32)
    return torch.cat([starts, starts.new_full((1,), positions.numel())])


def token_positions(positions: Positions, length: int, device: torch.device) -> Tensor:
    """(B, N) or, for sequences that are alike, (1, N) int64 positions."""
    if isinstance(positions, int):
        return torch.arange(positions, positions + length, device=device)[None]
    return positions


def alike(positions: Tensor) -> Positions:
    """One number in place of positions (B, N) where all sequences hold one document and stand at the same token of it.

    Ops then make no masks. Positions on another device stay as they are: reading them would make the host wait.
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
    """Tokens before itself in a token's window: of the current block of its document and the `blocks` - 1 before.

    The block rule: blocks restart at every document, and a position lies in block position // block_size.
    """
    return torch.minimum(positions, positions % block_size + (blocks - 1) * block_size)


def sees_far(positions: Tensor, block_size: int, blocks: int) -> Tensor:
    """Whether a block lies before the token's window of `blocks`: the token sees its landmarks."""
    return positions >= block_size * blocks


def ends_block(positions: Tensor, block_size: int, blocks: int) -> Tensor:
    """Whether the token ends its block, and the first block of its window of `blocks` is complete."""
    return (positions % block_size == block_size - 1) & (positions >= block_size * blocks - 1)


def pad_positions(positions: Tensor, count: int) -> Tensor:
    """`count` more tokens of the last document."""
    more = torch.arange(1, count + 1, device=positions.device)
    return torch.cat([positions, positions[:, -1:] + more], 1)


def began_before(positions: Positions, length: int, device: torch.device) -> Tensor:
    """(B, N) or (1, N) bool: the token's document began before the sequence."""
    return token_positions(positions, length, device) > torch.arange(length, device=device)


def open_documents(positions: Positions, length: int, batch: int, device: torch.device) -> Tensor:
    """(B,) bool: no document starts inside the sequence, so what enters it also leaves it."""
    if isinstance(positions, int):
        return torch.full((batch,), positions > 0, device=device)
    return positions[:, -1] >= length


def carried(positions: Positions, tokens: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """What tokens (B, H, N, ...) leave of the state that enters them: all or nothing, (B,) bool, see `open_documents`.

    Of a state that decays, log_decay (B, H_kv, N): the factor, (B, H_kv).
    """
    carries = open_documents(positions, tokens.shape[2], len(tokens), tokens.device)
    return carries if log_decay is None else torch.where(carries[:, None], log_decay.sum(2).exp(), 0.0)


def reversed_positions(positions: Tensor, continued: bool = False) -> Tensor:
    """Positions (B, N) of the sequences read backwards.

    continued: read so, each sequence goes on with a document that began before it, as far away as makes no difference.
    """
    length = positions.shape[1]
    places = torch.arange(length, device=positions.device)
    end = 2 * length if continued else length
    starts = torch.where(positions == 0, places, end)
    following = torch.cat([starts[:, 1:], starts.new_full((len(starts), 1), end)], 1)
    ends = following.flip(1).cummin(1).values.flip(1)
    return (ends - 1 - places).flip(1)
