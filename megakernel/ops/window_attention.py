"""Windowed softmax attention: the local window of FLuRKA alone."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.arguments import check_cached, check_choice, check_heads, check_positions
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions, token_positions
from megakernel.ops.groups import scan_groups
from megakernel.ops.mixture import by_component, first_key, pack_keys, packed_rotary
from megakernel.ops.partial_output import normalized
from megakernel.ops.tensors import Tensors, accum_dtype
from megakernel.ops.window import (
    LocalWindow,
    Rotation,
    Tail,
    empty_tail,
    token_window,
    window_inputs,
    window_sums,
)

GROUP = 4096
"""Tokens whose windows are in memory at once; rounded down to a multiple of the block."""


class WindowInputs(NamedTuple):
    """Validated arguments of a backend other than queries, keys and values; see `window_attention`."""

    tail: Tail
    positions: Positions
    window: LocalWindow
    priors: Tensor | None
    shift: Tensor | None


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_size: int,
    blocks: int = 1,
    priors: Tensor | None = None,
    shift: Tensor | None = None,
    rotary: Rotation | None = None,
    positions: Positions = 0,
    initial_state: Tail | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tail]:
    """Causal softmax over a token's current block of its document, optionally also over the previous block.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; (B, H_kv, M, N, d) with priors and no shift.
        v: (B, H_kv, N, D).
        block_size: tokens per block, b; blocks restart at every document.
        blocks: 1 current block, 2 current and previous block.
        priors: pi (H_kv, M) >= 0 of mixture keys: a token weighs sum_r pi_r exp(q.k_r / sqrt(d)).
        shift: b (H_kv, M, d), only with priors: the keys of a token are k + b_r.
        rotary: rotates q and k, which are passed unrotated, by their positions.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document. They determine which tokens of `initial_state` belong to the current document.
        initial_state: the last block_size * blocks tokens before these.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v, and the tail after the last token.

    Raises:
        ValueError: invalid shapes, dtypes or devices; the message names the argument.
    """
    check_heads(q, first_key(k, priors, shift), v)
    check_choice("blocks", blocks, (1, 2))
    check_positions(positions, q)
    if block_size < 1:
        raise ValueError(f"block_size={block_size}; expected at least 1")
    k = pack_keys(k)
    if initial_state is not None:
        check_cached("initial_state", initial_state, k, v, block_size * blocks)
    tail = initial_state or empty_tail(k, v, block_size * blocks)
    window = LocalWindow(block_size, blocks, packed_rotary(rotary, q.shape[-1]))
    return choose(IMPLEMENTATIONS, backend)(q, k, v, WindowInputs(tail, positions, window, priors, shift))


def chunked(q: Tensor, k: Tensor, v: Tensor, inputs: WindowInputs) -> tuple[Tensor, Tail]:
    """In linear time, on any device."""
    tail, positions, window, priors, shift = inputs

    def on_group(positions: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        tail, (q, k, v) = Tail(*carry), sequences
        if q.shape[2] == 1:
            extended = tail.and_token(k, v)
            dtype = accum_dtype(q.dtype)
            last = token_window(extended, positions, window.block_size, window.blocks, dtype)
            out = last.softmax_mean(q.to(dtype), window.rotary, *shared)
            return (out.to(v.dtype),), tuple(extended.without_oldest)
        sums = window_sums(q, k, v, tail, positions, window, *shared)
        return (normalized(sums).to(v.dtype),), tuple(tail.after(k, v))

    group = window.block_size * max(1, GROUP // window.block_size)
    (out,), carry = scan_groups(
        on_group, tuple(tail), (q, k, v), (priors, shift), group=group, positions=positions
    )
    return out, Tail(*carry)


def reference(q: Tensor, k: Tensor, v: Tensor, inputs: WindowInputs) -> tuple[Tensor, Tail]:
    """From the formula, query by query."""
    tail, positions, window, priors, shift = inputs
    group, dtype = q.shape[1] // k.shape[1], accum_dtype(q.dtype)
    at = token_positions(positions, q.shape[2], q.device)
    queries, past, keys = window_inputs(q, k, tail, positions, window, shift)
    keys = torch.cat([past, keys], 2).repeat_interleave(group, 1)
    components, shares = by_component(keys, priors, q.shape[-1])
    values = torch.cat([tail.values, v], 2).to(dtype).repeat_interleave(group, 1)
    before = past.shape[2]
    outputs = []
    for b, row in enumerate(at.expand(q.shape[0], -1).tolist()):
        for i, position in enumerate(row):
            block = position // window.block_size
            oldest = max(0, (block - window.blocks + 1) * window.block_size)
            tokens = slice(before + i - (position - oldest), before + i + 1)
            scores = components[:, b, :, tokens] @ queries[b, :, i, :, None] * q.shape[-1] ** -0.5
            # The maximum of all scores cancels in the quotient.
            largest = scores.detach().amax((0, 2), keepdim=True)
            weights = (shares * torch.exp(scores - largest)).sum(0)
            outputs.append((weights / weights.sum(1, keepdim=True) * values[b, :, tokens]).sum(1))
    out = torch.stack(outputs).view(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return out.to(v.dtype), tail.after(k, v)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
