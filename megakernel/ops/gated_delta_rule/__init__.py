"""The gated delta rule: a decaying state that replaces the value stored under a key.

S_i = a_i (I - b_i k_i k_i^T) S_(i-1) + b_i k_i v_i^T and o_i = q_i^T S_i / sqrt(d). See docs/formulas.md, 9.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from megakernel.ops.arguments import (
    check_entering,
    check_heads,
    check_positions,
    expand_log_decay,
    expand_tokens,
    matrix_state,
)
from megakernel.ops.chunks import chunk_keys
from megakernel.ops.decay import Chunks, scaled, scan_tokens
from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.documents import Positions, token_positions
from megakernel.ops.tensors import accum_dtype

AffineExchange = Callable[[Tensor, Tensor], Tensor]
"""(A (B, H_kv, d, d), S (B, H_kv, d, D)) of a shard -> its entering state E. The shard's outgoing state is A E + S."""


def _kernels() -> ModuleType:
    from megakernel.ops.gated_delta_rule import triton

    return triton


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    *,
    positions: Positions = 0,
    initial_state: Tensor | None = None,
    exchange: AffineExchange | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: a token moves the value stored under its key toward its own value, by the share b.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; with a norm above 1, states may grow.
        v: (B, H_kv, N, D).
        log_decay: log a <= 0, broadcastable to (B, H_kv, N): log factor of the state before the token is added.
        strength: b in [0, 1], broadcastable to (B, H_kv, N).
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document. A document begins with an empty state.
        initial_state: (B, H_kv, d, D), the state that sequences continue from.
        exchange: for sequences sharded over ranks, instead of `initial_state`.
        backend: reference, chunked or triton; None reads MEGAKERNEL_BACKEND from the environment, and by default takes
            triton (flash-linear-attention's kernels) on a GPU and chunked elsewhere.

    Returns:
        (B, H, N, D) in the dtype of v, and the state after the last token; with `exchange`, the state that these tokens
        make from an empty one.

    Raises:
        ValueError: invalid shapes, dtypes or devices; the message names the argument.
    """
    check_heads(q, k, v)
    check_positions(positions, q)
    check_entering(initial_state, exchange)
    dtype, width = accum_dtype(k.dtype), v.shape[3]
    log_decay = expand_log_decay(log_decay, k)
    strength = expand_tokens("strength", strength, k).to(dtype)
    attend = choose(IMPLEMENTATIONS, backend)
    state, values = matrix_state(initial_state, k, v), v
    if exchange is not None:
        # Extra value columns, zeros on an initial state I, turn into A in the state and into q_i^T A_i in the outputs.
        unit = torch.eye(k.shape[3], dtype=dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        state, values = torch.cat([state, unit], -1), torch.cat([v, v.new_zeros(k.shape)], -1)
    out, leaving = attend(q, k, values, log_decay, strength, positions, state)
    if exchange is not None:
        entering = exchange(leaving[..., width:], leaving[..., :width])
        out, through = out[..., :width], out[..., width:]
        out = out + through.to(dtype) @ entering.repeat_interleave(q.shape[1] // k.shape[1], 1)
        leaving = leaving[..., :width]
    return out.to(v.dtype), leaving


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunks within groups of tokens, with states between chunks; a single token by the formula."""
    if q.shape[2] == 1:
        return reference(q, k, v, log_decay, strength, positions, state)
    return scan_tokens(_group, (q, k, v, log_decay[..., None], strength[..., None]), positions, state)


def _group(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
):
    chunks = Chunks.of(q, k, v, log_decay, positions, state.dtype)
    keys, values = chunks.keys, chunks.values
    strengths = chunk_keys(strength, keys.shape[3], keys.shape[2])
    # What a chunk's tokens write solves a triangular system: U = b (V - kept K S) - T U, T strictly lower triangular.
    coupling = strengths * chunks.pairs * (keys @ keys.transpose(-1, -2))
    right_side = strengths * torch.cat([values, keys * chunks.kept[..., None]], -1)
    solved = torch.linalg.solve_triangular(coupling, right_side, upper=False, unitriangular=True)
    from_values, from_keys = solved[..., : values.shape[-1]], solved[..., values.shape[-1] :]
    decayed_keys = (keys * chunks.left[..., None]).transpose(-1, -2)
    decay = chunks.whole.exp().masked_fill(~chunks.links.carries[:, None], 0.0)
    states, written = [], []
    for chunk in range(keys.shape[2]):
        states.append(state)
        written.append(from_values[:, :, chunk] - from_keys[:, :, chunk] @ state)
        state = decay[:, :, chunk, None, None] * state + decayed_keys[:, :, chunk] @ written[-1]
    return chunks.token_outputs(torch.stack(written, 2), torch.stack(states, 2), *q.shape[1:3]), state


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Straight from the formula, one token at a time."""
    at = token_positions(positions, q.shape[2], q.device).expand(len(q), -1)
    queries, keys, values = scaled(q, state.dtype), k.to(state.dtype), v.to(state.dtype)
    outputs = []
    for place in range(q.shape[2]):
        is_start = (at[:, place] == 0)[:, None, None, None]
        state = torch.where(is_start, 0.0, state * log_decay[:, :, place, None, None].exp())
        key = keys[:, :, place, :, None]
        error = values[:, :, place, None] - key.transpose(-1, -2) @ state
        state = state + key * error * strength[:, :, place, None, None]
        seen = state.repeat_interleave(q.shape[1] // k.shape[1], 1)
        outputs.append((queries[:, :, place, None] @ seen)[..., 0, :])
    return torch.stack(outputs, 2), state


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": chunked,
    "reference": reference,
    "triton": Kernels("gated_delta_rule", _kernels),
}
"""Backend -> implementation."""
