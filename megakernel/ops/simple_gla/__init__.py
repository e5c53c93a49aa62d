"""Linear attention whose state decays: S_i = a_i S_(i-1) + k_i v_i^T and o_i = q_i^T S_i / sqrt(d).

See docs/formulas.md, 9.
"""

from types import ModuleType

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads, expand_tokens
from megakernel.ops.chunks import token_queries, unchunk_token
from megakernel.ops.decay import Chunks, scaled, scan_tokens
from megakernel.ops.dispatch import Implementation, Kernels, accum_dtype, choose
from megakernel.ops.documents import Positions, began_before, carried, token_positions
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
    positions: Positions = 0,
    initial_state: Tensor | None = None,
    exchange: Exchange | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention with weights q_i.k_j / sqrt(d) times the decays between j and i, linear in the tokens.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        log_decay: log a <= 0, broadcastable to (B, H_kv, N): what a token multiplies the state by before it enters.
        positions: (B, N) positions within documents, or the position of the first token of sequences that hold one
            document each. A document begins with an empty state.
        initial_state: (B, H_kv, d, D), what sequences continue from.
        exchange: gets what these tokens add to the state and the factor that they leave of it, and gives what enters,
            for a sequence cut over processes; in place of `initial_state`.
        backend: reference, chunked or triton; None takes the environment's MEGAKERNEL_BACKEND, else the kernels on a
            GPU and chunked elsewhere.

    Returns:
        (B, H, N, D) in the dtype of v, and the state behind the last token; with `exchange` what these tokens add.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    log_decay = expand_tokens("log_decay", log_decay, k).to(accum_dtype(k.dtype))
    out, leaving = choose(IMPLEMENTATIONS, backend)(q, k, v, log_decay, positions, initial_state, exchange)
    return out.to(v.dtype), leaving


def _exchanging(attend: Implementation) -> Implementation:
    """`attend` of a whole sequence, also of one that is cut over processes."""

    def attend_shard(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        positions: Positions,
        state: Tensor | None,
        exchange: Exchange | None,
    ) -> tuple[Tensor, Tensor]:
        if state is None:
            state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=log_decay.dtype)
        out, leaving = attend(q, k, v, log_decay, positions, state)
        if exchange is None:
            return out, leaving
        entering = exchange(of_sums(leaving), carried(positions, q, log_decay)).wait()
        entered = entering.sums * entering.log_scale.exp()[..., None, None]
        # What a token sees of it has decayed over all tokens of the shard up to this one.
        kept = (
            log_decay.cumsum(2)
            .exp()
            .masked_fill(~began_before(positions, q.shape[2], q.device)[:, None], 0.0)
        )
        group = q.shape[1] // k.shape[1]
        entered, kept = (x.repeat_interleave(group, 1) for x in (entered, kept))
        return out + (scaled(q, entered.dtype) @ entered) * kept[..., None], leaving

    return attend_shard


def of_sums(sums: Tensor) -> KernelState:
    """A state of sums (B, H_kv, d, D)."""
    return KernelState(sums, sums.new_zeros(sums.shape[:2]))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunks inside groups of tokens, states between them."""
    return scan_tokens(_group, (q, k, v, log_decay[..., None]), positions, state)


def _group(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor):
    if q.shape[2] == 1:
        return _token(q, k, v, log_decay, positions, state)
    chunks = Chunks.of(q, k, v, log_decay, positions, state.dtype)
    # What every chunk adds, and the states that enter it: a triangular matrix of decays times the additions.
    added = (chunks.keys * chunks.left[..., None]).transpose(-1, -2) @ chunks.values
    behind = torch.cat([torch.zeros_like(chunks.whole[..., :1]), chunks.whole.cumsum(-1)], -1)
    decays = behind[..., :, None] - behind[..., None, :]
    decays = decays.masked_fill(~alive_chunks(chunks.links), -torch.inf).exp()
    stack = torch.cat([state[:, :, None], added], 2).flatten(-2)
    states = (decays @ stack).unflatten(-1, added.shape[-2:])
    out = chunks.weighed(chunks.values, states[:, :, :-1], *q.shape[1:3])
    # A copy: what leaves a group is kept for backward, and a view would keep the states of all chunks with it.
    return out, states[:, :, -1].clone()


def _token(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, state: Tensor):
    """`_group` for one token: it enters the state, and reads it."""
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
    """From the formula: one N x N matrix of products of decays, and the state one token after the other."""
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
        # The product of the decays behind each earlier token, and 1 for the token itself.
        row = torch.where(places == place, 1.0, row * log_decay[:, :, place, None].exp())
        products.append(row)
    weights = (scaled(q, state.dtype) @ keys.repeat_interleave(group, 1).transpose(-1, -2)) * seen[:, None]
    out = (weights * torch.stack(products, 2).repeat_interleave(group, 1)) @ values.repeat_interleave(
        group, 1
    )
    entered, seen_of_it = state, []
    for place in range(length):
        fresh = (at[:, place] == 0)[:, None, None, None]
        factor = log_decay[:, :, place, None, None].exp()
        entered, state = (torch.where(fresh, 0.0, x * factor) for x in (entered, state))
        seen_of_it.append(entered.repeat_interleave(group, 1))
        state = state + keys[:, :, place, :, None] * values[:, :, place, None]
    from_before = torch.stack(seen_of_it, 2)
    return out + (scaled(q, state.dtype)[..., None, :] @ from_before)[..., 0, :], state


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": _exchanging(chunked),
    "reference": _exchanging(reference),
    "triton": Kernels("simple_gla", _kernels),
}
"""Backend -> implementation."""
