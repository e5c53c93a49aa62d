"""Kernel attention: phi(q)^T sum_j phi(k_j) v_j^T, normalized by phi(q)^T sum_j phi(k_j)."""

from torch import Tensor

from megakernel.ops.arguments import (
    check_cu_seqlens,
    check_feature_map,
    check_heads,
    check_positions,
    check_state,
    expand_tokens,
)
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions, positions_from_cu_seqlens
from megakernel.ops.kernel_attention import chunked, reference
from megakernel.ops.state import Exchange, KernelState

IMPLEMENTATIONS = {"chunked": chunked.attend, "reference": reference.attend}
"""Backend -> implementation."""


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str,
    projection: Tensor | None = None,
    causal: bool = True,
    normalize: bool = True,
    mass: Tensor | None = None,
    initial_state: KernelState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    positions: Positions | None = None,
    exchange: Exchange | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, KernelState]:
    """Attention with the kernel phi(q).phi(k), linear in the number of tokens (MECHANISMS section 2).

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; query head h uses key head h // (H / H_kv).
        v: (B, H_kv, N, D), all three of one floating dtype.
        feature_map: elu, favor, hedgehog, relu or identity.
        projection: omega (M, d) of favor or W (d, d) of hedgehog, or one per key head (H_kv, ...).
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        normalize: divide by the sum of weights; where that is 0 (all keys masked) the output is 0.
        mass: multiplies phi(k) per key, broadcastable to (B, H_kv, N); 0 removes a key.
        initial_state: what rows continue from.
        return_state: also return the state after each row's last document.
        cu_seqlens: int32 or int64 starts of documents in the B * N tokens, and B * N at the end. A row whose
            first token is not listed continues `initial_state`; a listed start begins empty. Documents never
            cross rows.
        positions: instead of cu_seqlens, (B, N) positions within documents, or the position of the first
            token of rows that hold one document each. A position beyond the place in the row continues
            `initial_state`.
        exchange: gets what these tokens add to the state and gives what enters, for a sequence cut over
            processes; causal only, in place of `initial_state`. The state returned is then what these tokens
            add.
        backend: reference or chunked; None takes the environment's MEGAKERNEL_BACKEND, else chunked.

    Returns:
        (B, H, N, D) in the dtype of v, and the state if asked for; its sums are float32 or better.

    Raises:
        ValueError: shapes, dtypes, devices or names that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    check_feature_map(feature_map, projection, k)
    batch, _, length, _ = k.shape
    if mass is not None:
        mass = expand_tokens("mass", mass, k)
    if initial_state is not None:
        check_state(initial_state, k, v)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, batch * length)
        positions = positions_from_cu_seqlens(cu_seqlens.to(q.device), batch, length)
    elif isinstance(positions, Tensor):
        check_positions(positions, q)
    elif positions is None:
        # Any position beyond the first place of a row says that the row continues what entered it.
        positions = 0 if initial_state is None else 1
    out, state = choose(IMPLEMENTATIONS, backend)(
        q,
        k,
        v,
        feature_map=feature_map,
        projection=projection,
        causal=causal,
        normalize=normalize,
        mass=mass,
        positions=positions,
        initial_state=initial_state,
        exchange=exchange,
    )
    return (out, state) if return_state else out
