"""A state that decays, and corrects what it holds under a key: the gated delta rule.

S_i = a_i (I - b_i k_i k_i^T) S_(i-1) + b_i k_i v_i^T and o_i = q_i^T S_i / sqrt(d). See docs/formulas.md, 9.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads, expand_tokens
from megakernel.ops.chunks import chunk_keys
from megakernel.ops.decay import Chunks, scaled, scan_tokens
from megakernel.ops.dispatch import Implementation, Kernels, accum_dtype, choose
from megakernel.ops.documents import Positions, token_positions

AffineExchange = Callable[[Tensor, Tensor], Tensor]
"""(A (B, H_kv, d, d), S (B, H_kv, d, D)) of a shard, which makes A E + S of the state E that enters it -> E."""


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
    """Causal attention over a state that forgets, of what it has under a key, as much as the key's token writes anew.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; of length at most 1 where states are not to grow.
        v: (B, H_kv, N, D).
        log_decay: log a <= 0, finite, broadcastable to (B, H_kv, N): what a token multiplies the state by before it
            enters.
        strength: b in [0, 1], broadcastable to (B, H_kv, N).
        positions: (B, N) positions within documents, or the position of the first token of sequences that hold one
            document each. A document begins with an empty state.
        initial_state: (B, H_kv, d, D), what sequences continue from.
        exchange: for a sequence cut over processes, which has no `initial_state`.
        backend: reference, chunked or triton; None takes the environment's MEGAKERNEL_BACKEND, else the kernels on a
            GPU and chunked elsewhere.

    Returns:
        (B, H, N, D) in the dtype of v, and the state behind the last token; with `exchange` what these tokens make of
        an empty one.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    dtype, width = accum_dtype(k.dtype), v.shape[3]
    log_decay = expand_tokens("log_decay", log_decay, k).to(dtype)
    strength = expand_tokens("strength", strength, k).to(dtype)
    attend = choose(IMPLEMENTATIONS, backend)
    sizes, values = (*k.shape[:2], k.shape[3], width), v
    if initial_state is None:
        state = k.new_zeros(sizes, dtype=dtype)
    elif initial_state.shape != sizes:
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}; expected {sizes}")
    else:
        state = initial_state.to(dtype)
    if exchange is not None:
        # Further columns, of no values on the identity, become A, and the outputs' q_i^T A_i.
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
    """Chunks inside groups of tokens, from state to state; one token as the formula says."""
    if q.shape[2] == 1:
        return reference(q, k, v, log_decay, strength, positions, state)
    return scan_tokens(_group, (q, k, v, log_decay[..., None], strength[..., None]), positions, state)


def _group(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
):
    chunks = Chunks.of(q, k, v, log_decay, positions, state.dtype)
    keys, values = chunks.keys, chunks.values
    strengths = chunk_keys(strength, keys.shape[3], keys.shape[2])
    # What the tokens of a chunk write is one triangular system: U = b (V - kept K S - T U), T below the diagonal.
    coupling = strengths * chunks.pairs * (keys @ keys.transpose(-1, -2))
    given = strengths * torch.cat([values, keys * chunks.kept[..., None]], -1)
    solved = torch.linalg.solve_triangular(coupling, given, upper=False, unitriangular=True)
    own, of_state = solved[..., : values.shape[-1]], solved[..., values.shape[-1] :]
    adding = (keys * chunks.left[..., None]).transpose(-1, -2)
    whole = chunks.whole.exp().masked_fill(~chunks.links.carries[:, None], 0.0)
    states, written = [], []
    for chunk in range(keys.shape[2]):
        states.append(state)
        written.append(own[:, :, chunk] - of_state[:, :, chunk] @ state)
        state = whole[:, :, chunk, None, None] * state + adding[:, :, chunk] @ written[-1]
    return chunks.weighed(torch.stack(written, 2), torch.stack(states, 2), *q.shape[1:3]), state


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """From the formula, one token after the other."""
    at = token_positions(positions, q.shape[2], q.device).expand(len(q), -1)
    queries, keys, values = scaled(q, state.dtype), k.to(state.dtype), v.to(state.dtype)
    outputs = []
    for place in range(q.shape[2]):
        fresh = (at[:, place] == 0)[:, None, None, None]
        state = torch.where(fresh, 0.0, state * log_decay[:, :, place, None, None].exp())
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
