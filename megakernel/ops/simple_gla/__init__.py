"""Linear attention with a decaying state: S_i = a_i S_(i-1) + k_i v_i^T and o_i = q_i^T S_i / sqrt(d).

See docs/formulas.md, 9.
"""

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
from megakernel.ops.chunks import token_queries, unchunk_token
from megakernel.ops.decay import Chunks, scaled, scan_tokens
from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.documents import Positions, began_before, carry_factor, token_positions
from megakernel.ops.scan import alive_chunks
from megakernel.ops.state import Exchange, KernelState


def _kernels() -> ModuleType:
    from megakernel.ops.simple_gla import triton

    return triton


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    value_scale: Tensor | None = None,
    positions: Positions = 0,
    initial_state: Tensor | None = None,
    exchange: Exchange | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention with weights q_i.k_j / sqrt(d) times the decays from j to i, linear in sequence length.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        log_decay: log a <= 0, broadcastable to (B, H_kv, N): log factor of the state before the token is added.
        value_scale: factor of v, broadcastable to (B, H_kv, N), such as Mamba-2's step, in float32 or better.
            The product is not rounded to the dtype of v, because gradients of decays are differences of sums over it.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document. A document begins with an empty state.
        initial_state: (B, H_kv, d, D), the state that sequences continue from.
        exchange: for sequences sharded over ranks, instead of `initial_state`: takes the state that these tokens add
            and their decay factor, and returns the entering state.
        backend: reference, chunked or triton; None reads MEGAKERNEL_BACKEND from the environment, and by default takes
            triton on a GPU and chunked elsewhere.

    Returns:
        (B, H, N, D) in the dtype of v, and the state after the last token; with `exchange`, what these tokens add.

    Raises:
        ValueError: invalid shapes, dtypes or devices; the message names the argument.
    """
    check_heads(q, k, v)
    check_positions(positions, q)
    check_entering(initial_state, exchange)
    log_decay = expand_log_decay(log_decay, k)
    state = None if initial_state is None else matrix_state(initial_state, k, v)
    if value_scale is not None:
        value_scale = expand_tokens("value_scale", value_scale, k)
    out, leaving = choose(IMPLEMENTATIONS, backend)(
        q, k, v, log_decay, value_scale, positions, state, exchange
    )
    return out.to(v.dtype), leaving


def _with_exchange(attend: Implementation) -> Implementation:
    """Add the arguments `value_scale` and `exchange` to an `attend` that works on whole sequences."""

    def attend_shard(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        value_scale: Tensor | None,
        positions: Positions,
        state: Tensor | None,
        exchange: Exchange | None,
    ) -> tuple[Tensor, Tensor]:
        values = scaled_values(v, value_scale)
        out, leaving = attend(q, k, values, log_decay, positions, matrix_state(state, k, v))
        if exchange is None:
            return out, leaving
        entering = exchange(unscaled_state(leaving), carry_factor(positions, q, log_decay)).wait()
        entered = entering.sums * entering.log_scale.exp()[..., None, None]
        # A token sees the entering state decayed by all tokens of the shard up to itself.
        reads = began_before(positions, q.shape[2], q.device)[:, None]
        kept = log_decay.cumsum(2).exp().masked_fill(~reads, 0.0)
        group = q.shape[1] // k.shape[1]
        entered, kept = (x.repeat_interleave(group, 1) for x in (entered, kept))
        return out + (scaled(q, entered.dtype) @ entered) * kept[..., None], leaving

    return attend_shard


def scaled_values(v: Tensor, value_scale: Tensor | None) -> Tensor:
    """v times its factor, in the wider dtype of both."""
    return v if value_scale is None else v * value_scale[..., None]


def unscaled_state(sums: Tensor) -> KernelState:
    """The state with sums (B, H_kv, d, D) and log scale 0."""
    return KernelState(sums, sums.new_zeros(sums.shape[:2]))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunks within groups of tokens, with states between chunks."""
    return scan_tokens(_group, (q, k, v, log_decay[..., None]), positions, state)


def _group(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor):
    if q.shape[2] == 1:
        return _token(q, k, v, log_decay, positions, state)
    chunks = Chunks.of(q, k, v, log_decay, positions, state.dtype)
    # The sums of each chunk, and the states that enter chunks: a triangular matrix of decays times these sums.
    added = (chunks.keys * chunks.left[..., None]).transpose(-1, -2) @ chunks.values
    logs = torch.cat([torch.zeros_like(chunks.whole[..., :1]), chunks.whole.cumsum(-1)], -1)
    decays = logs[..., :, None] - logs[..., None, :]
    decays = decays.masked_fill(~alive_chunks(chunks.links), -torch.inf).exp()
    stack = torch.cat([state[:, :, None], added], 2).flatten(-2)
    states = (decays @ stack).unflatten(-1, added.shape[-2:])
    out = chunks.token_outputs(chunks.values, states[:, :, :-1], *q.shape[1:3])
    # A copy: the final state is saved for backward, and a view would keep the states of all chunks alive.
    return out, states[:, :, -1].clone()


def _token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor):
    """`_group` for one token: add it to the state, then read the state."""
    q, k, v, kept = (x.to(state.dtype) for x in (q, k, v, log_decay.exp()))
    if isinstance(positions, Tensor):
        kept = kept.masked_fill(positions[:, None, :, None] == 0, 0.0)
    elif positions == 0:
        kept = torch.zeros_like(kept)
    state = state * kept + k.transpose(-1, -2) * v
    out = token_queries(scaled(q, state.dtype), k.shape[1]) @ state[:, :, None]
    return unchunk_token(out), state


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Straight from the formula: an N x N matrix of products of decays, and the state one token at a time."""
    batch, _, length, _ = q.shape
    group = q.shape[1] // k.shape[1]
    at = token_positions(positions, length, q.device).expand(batch, -1)
    keys, values = k.to(state.dtype), v.to(state.dtype)
    places = torch.arange(length, device=q.device)
    first = places - at
    seen = (places[:, None] >= places) & (places >= first[..., None])
    row = torch.zeros(*log_decay.shape, dtype=state.dtype, device=q.device)
    products = []
    for place in range(length):
        # For each earlier token, the product of the decays after it; 1 for the token itself.
        row = torch.where(places == place, 1.0, row * log_decay[:, :, place, None].exp())
        products.append(row)
    weights = (scaled(q, state.dtype) @ keys.repeat_interleave(group, 1).transpose(-1, -2)) * seen[:, None]
    out = (weights * torch.stack(products, 2).repeat_interleave(group, 1)) @ values.repeat_interleave(
        group, 1
    )
    entered, entered_at_token = state, []
    for place in range(length):
        is_start = (at[:, place] == 0)[:, None, None, None]
        factor = log_decay[:, :, place, None, None].exp()
        entered, state = (torch.where(is_start, 0.0, x * factor) for x in (entered, state))
        entered_at_token.append(entered.repeat_interleave(group, 1))
        state = state + keys[:, :, place, :, None] * values[:, :, place, None]
    from_state = scaled(q, state.dtype)[..., None, :] @ torch.stack(entered_at_token, 2)
    return out + from_state[..., 0, :], state


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": _with_exchange(chunked),
    "reference": _with_exchange(reference),
    "triton": Kernels("simple_gla", _kernels),
}
"""Backend -> implementation."""
