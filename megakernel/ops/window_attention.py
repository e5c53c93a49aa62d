"""Windowed softmax attention: the near part of FLuRKA alone."""

import torch
from torch import Tensor

from megakernel.ops.arguments import check_choice, check_heads, check_positions
from megakernel.ops.dispatch import accum_dtype, choose
from megakernel.ops.documents import Positions, token_positions
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.mixture import by_component, first_key, pack_keys, rotated_each
from megakernel.ops.partial_output import normalized
from megakernel.ops.window import LocalWindow, Rotary, Tail, attended, empty_tail, recent, window_sums

GROUP = 4096
"""Tokens whose windows exist at once; the next multiple of a block is taken."""


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
        positions: (B, N) positions within documents, or the position of the first token of sequences that hold one
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
    window = LocalWindow(block_size, blocks, rotated_each(rotary, q.shape[-1]))
    return choose(IMPLEMENTATIONS, backend)(q, k, v, tail, positions, window, priors, shift)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tail: Tail,
    positions: Positions,
    window: LocalWindow,
    priors: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tail]:
    """In linear time, on any device."""
    varying = None if isinstance(positions, int) else positions[:, None]

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, k, v, at = sequences
        tail, places = Tail(*carry), positions + start if at is None else at[:, 0]
        if q.shape[2] == 1:
            joined = tail.and_token(k, v)
            dtype = accum_dtype(q.dtype)
            seen = recent(joined, places, window.block_size, window.blocks, dtype)
            out = seen.softmax_mean(q.to(dtype), window.rotary, *shared)
            return (out.to(v.dtype),), tuple(joined.without_oldest)
        sums = window_sums(q, k, v, tail, places, window, *shared)
        return (normalized(sums).to(v.dtype),), tuple(tail.after(k, v))

    group = window.block_size * max(1, GROUP // window.block_size)
    (out,), left = scan_groups(on_group, tuple(tail), (q, k, v, varying), (priors, shift), group=group)
    return out, Tail(*left)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tail: Tail,
    positions: Positions,
    window: LocalWindow,
    priors: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tail]:
    """From the formula, query by query."""
    group, dtype = q.shape[1] // k.shape[1], accum_dtype(q.dtype)
    at = token_positions(positions, q.shape[2], q.device)
    queries, past, keys = attended(q, k, tail, positions, window, shift)
    keys = torch.cat([past, keys], 2).repeat_interleave(group, 1)
    components, shares = by_component(keys, priors, q.shape[-1])
    values = torch.cat([tail.values, v], 2).to(dtype).repeat_interleave(group, 1)
    before = past.shape[2]
    outputs = []
    for b, places in enumerate(at.expand(q.shape[0], -1).tolist()):
        for i, position in enumerate(places):
            block = position // window.block_size
            oldest = max(0, (block - window.blocks + 1) * window.block_size)
            seen = slice(before + i - (position - oldest), before + i + 1)
            scores = components[:, b, :, seen] @ queries[b, :, i, :, None] * q.shape[-1] ** -0.5
            # Dividing all weights of a query by one number changes no quotient.
            largest = scores.detach().amax((0, 2), keepdim=True)
            weights = (shares * torch.exp(scores - largest)).sum(0)
            outputs.append((weights / weights.sum(1, keepdim=True) * values[b, :, seen]).sum(1))
    out = torch.stack(outputs).view(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return out.to(v.dtype), tail.after(k, v)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
