"""Windowed softmax attention: the near part of FLuRKA alone."""

from torch import Tensor

from megakernel.ops.arguments import check_choice, check_heads, check_positions
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions
from megakernel.ops.mixture import first_key, pack_keys, rotated_each
from megakernel.ops.window import Rotary, Tail, empty_tail
from megakernel.ops.window_attention import chunked, reference

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    blocks: int = 1,
    priors: Tensor | None = None,
    shift: Tensor | None = None,
    rotary: Rotary | None = None,
    positions: Positions = 0,
    initial_state: Tail | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tail]:
    """Causal softmax over a token's current block of its document, optionally with the block before.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; (B, H_kv, M, N, d) with priors and no shift.
        v: (B, H_kv, N, D).
        block_size: tokens per block, b; blocks restart at every document.
        blocks: 1 current block, 2 current and previous block.
        priors: pi (H_kv, M) >= 0 of mixture keys: a token weighs sum_r pi_r exp(q.k_r / sqrt(d)).
        shift: b (H_kv, M, d), beside priors: the keys of a token are k + b_r.
        rotary: rotates q and k by their positions; q and k are handed in unrotated.
        positions: (B, N) positions within documents, or the position of the first token of rows that hold one
            document each. They say where a document that began in `initial_state` stands.
        initial_state: the last block_size * blocks tokens before these.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v, and the tail behind the last token.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, first_key(k, priors, shift), v)
    check_choice("blocks", blocks, (1, 2))
    if isinstance(positions, Tensor):
        check_positions(positions, q)
    k = pack_keys(k)
    tail = initial_state or empty_tail(k, v, block_size * blocks)
    out, tail = choose(IMPLEMENTATIONS, backend)(
        q,
        k,
        v,
        block_size=block_size,
        blocks=blocks,
        priors=priors,
        shift=shift,
        rotary=rotated_each(rotary, q.shape[-1]),
        positions=positions,
        tail=tail,
    )
    return out, tail
