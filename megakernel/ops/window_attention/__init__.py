"""Windowed softmax attention: the near part of FLuRKA alone."""

from typing import NamedTuple

from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions, next_position, resume_positions
from megakernel.ops.window import Rotary, Tail, empty_tail
from megakernel.ops.window_attention import chunked, reference

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


class WindowState(NamedTuple):
    """What a sequence carries from piece to piece: constant in the number of tokens."""

    tail: Tail
    """The last block_size * blocks tokens."""

    position: Positions
    """Position of the next token: one for all rows, or (B,)."""


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    blocks: int = 1,
    rotary: Rotary | None = None,
    positions: Positions | None = None,
    initial_state: WindowState | None = None,
    return_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, WindowState]:
    """Causal softmax over a token's own block of its document, optionally with the block before.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        block_size: tokens per block, b; blocks restart at every document.
        blocks: 1 own block, 2 own and previous block.
        rotary: rotates q and k by their positions; q and k are handed in unrotated.
        positions: (B, N) positions within documents, or the position of the first token of rows that hold one
            document each; None continues `initial_state`, or starts at 0.
        initial_state: what rows continue from.
        return_state: also return the state after the last token.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v, and the state if asked for.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    positions = resume_positions(positions, initial_state and initial_state.position, q)
    tail = initial_state.tail if initial_state else empty_tail(k, v, block_size * blocks)
    out, tail = choose(IMPLEMENTATIONS, backend)(
        q, k, v, block_size=block_size, blocks=blocks, rotary=rotary, positions=positions, tail=tail
    )
    return (out, WindowState(tail, next_position(positions, q.shape[2]))) if return_state else out
