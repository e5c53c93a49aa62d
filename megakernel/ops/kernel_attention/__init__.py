"""Kernel attention: phi(q)^T sum_j phi(k_j) v_j^T, divided by phi(q)^T sum_j phi(k_j)."""

from types import ModuleType

from torch import Tensor

from megakernel.ops.arguments import (
    check_cu_seqlens,
    check_entering,
    check_feature_map,
    check_heads,
    check_positions,
    expand_tokens,
)
from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.documents import Positions, positions_from_cu_seqlens
from megakernel.ops.feature_maps import Map, check_state
from megakernel.ops.kernel_attention import chunked, reference
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.mixture import first_key, pack_keys
from megakernel.ops.projections import Projection
from megakernel.ops.state import Exchange, KernelState


def _kernels() -> ModuleType:
    from megakernel.ops.kernel_attention import triton

    return triton


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": chunked.attend,
    "reference": reference.attend,
    "triton": Kernels("kernel_attention", _kernels),
}
"""Backend -> implementation."""


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: Map | str,
    projection: Projection | None = None,
    causal: bool = True,
    normalize: bool = True,
    key_weights: Tensor | None = None,
    priors: Tensor | None = None,
    initial_state: KernelState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    positions: Positions | None = None,
    exchange: Exchange | None = None,
    exchange_after: Exchange | None = None,
    cross: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, KernelState]:
    """Attention with the kernel phi(q).phi(k), linear in sequence length (docs/formulas.md, 2).

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv; query head h uses key head h // (H / H_kv).
        v: (B, H_kv, N, D). q, k and v share one floating dtype. If not `causal` and without documents, the number of
            keys and values may differ from the number of queries: then they are as with `cross`.
        feature_map: elu, relu, identity, hedgehog, favor, rks or prf; a `Map` adds options.
        projection: W (d, d) for hedgehog or omega (M, d) for favor, rks and prf, or one per key head (H_kv, ...), or a
            `FastFood` instead of omega.
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        normalize: divide by the sum of weights; if that is 0 (all keys masked), the output is 0.
        priors: pi (H_kv, M) >= 0 of mixture keys: k is then (B, H_kv, M, N, d), and sum_r pi_r phi(k_r) replaces
            phi(k).
        key_weights: multiplies phi(k) per key, broadcastable to (B, H_kv, N); 0 removes a key.
        initial_state: the state that each sequence continues from; not with `exchange`.
        return_state: also return the state after each sequence's last document.
        cu_seqlens: int32 or int64 document starts in the B * N tokens, followed by B * N. A sequence whose
            first token is not listed continues `initial_state`; a listed start begins empty. Documents never
            cross sequences.
        positions: instead of `cu_seqlens`, (B, N) positions within documents, or the position of the first
            token if each sequence holds one document. A token whose position exceeds its index in the sequence
            continues `initial_state`.
        exchange: for sequences sharded over ranks, instead of `initial_state`: takes the state that these tokens add
            and returns the entering state. The returned state is then what these tokens add.
        exchange_after: the same for the tokens after this shard. Required with `exchange` if not `causal`, and an
            error if `causal`.
        cross: keys and values are other tokens than queries, of which there may be another number: a key weight of 0
            then says nothing about a query. Without `causal` and documents.
        backend: reference, chunked or triton; None reads MEGAKERNEL_BACKEND from the environment, and by default takes
            triton on a GPU and chunked elsewhere.

    Returns:
        (B, H, N, D) in the dtype of v, and the state if requested; its sums are float32 or better.

    Raises:
        ValueError: invalid shapes, dtypes, devices or names; the message names the argument.
    """
    is_whole = not causal and positions is None and cu_seqlens is None
    if cross and not is_whole:
        raise ValueError("cross with causal=True, positions or cu_seqlens; leave them out")
    key = first_key(k, priors)
    check_heads(q, key, v, cross=is_whole)
    cross = cross or key.shape[2] != q.shape[2]
    k = pack_keys(k)
    check_feature_map(feature_map, projection, key)
    batch, _, length, _ = key.shape
    if key_weights is not None:
        key_weights = expand_tokens("key_weights", key_weights, key)
    if initial_state is not None:
        check_state(initial_state, feature_map, key, projection, v.shape[-1])
    check_entering(initial_state, exchange)
    if (exchange_after is not None) != (exchange is not None and not causal):
        expected = "exchange alone" if causal else "both or neither"
        raise ValueError(f"exchange and exchange_after with causal={causal}; expected {expected}")
    if cu_seqlens is not None:
        if positions is not None:
            raise ValueError("positions next to cu_seqlens; expected one of them")
        check_cu_seqlens(cu_seqlens, batch * length)
        positions = positions_from_cu_seqlens(cu_seqlens.to(q.device), batch, length)
    elif positions is not None:
        check_positions(positions, q)
    else:
        # Any position above 0 at the start of a sequence means that the sequence continues its entering state.
        positions = 0 if initial_state is None else 1
    options = KernelOptions(
        *(feature_map, projection, causal, normalize, key_weights, priors, positions, initial_state),
        *(exchange, exchange_after, return_state, cross),
    )
    out, state = choose(IMPLEMENTATIONS, backend)(q, k, v, options)
    return (out, state) if return_state else out
