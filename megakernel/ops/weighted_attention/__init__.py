"""Quadratic attention with a softmax or gaussian similarity and one or several keys per position."""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.arguments import check_cached, check_choice, check_heads, check_positions, expand
from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.documents import Positions
from megakernel.ops.softmax_attention.spans import Spans, document_spans
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.weighted_attention import reference, streamed
from megakernel.ops.weighted_attention.weights import Join, Similarity, WeightOptions


def _kernels() -> ModuleType:
    from megakernel.ops.weighted_attention import triton

    return triton


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": streamed.attend,
    "reference": reference.attend,
    "triton": Kernels("weighted_attention", _kernels),
}
"""Backend -> implementation."""

RESPONSIBILITIES = {"chunked": streamed.responsibilities, "reference": reference.responsibilities}
"""Backend -> implementation of `responsibilities`."""


class WeightedState(NamedTuple):
    """The key-value cache, which grows with the sequence."""

    keys: Tensor
    """(B, H_kv, M, S, d), rotated if keys are."""

    values: Tensor
    """(B, H_kv, S, D)"""


def weighted_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    similarity: Similarity = "gaussian",
    variances: Sequence[float] | None = None,
    join: Join = "sum",
    key_weights: Tensor | None = None,
    normalize: bool = True,
    causal: bool = True,
    positions: Positions = 0,
    initial_state: WeightedState | None = None,
    backend: str | None = None,
) -> tuple[Tensor, WeightedState]:
    """Attention over positions with M keys each (Transformer-MGK, eqs. 5 and 7; Skyformer, eq. 3).

    A query weighs position j by sum_r m_jr s_r(q, k_jr), where s_r is exp(q.k / sqrt(d)) or
    exp(-|q - k|^2 / 2 sigma_r^2). Memory is linear in N, time quadratic.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), or (B, H_kv, M, N, d) for M keys per position; H a multiple of H_kv.
        v: (B, H_kv, N, D). If attention is neither causal nor packed, keys and values may have another number of
            tokens than queries.
        similarity: softmax (dot product) or gaussian (distance).
        variances: sigma_r^2 of each of the M keys in units of sqrt(d), for gaussian; None: 1.
        join: sum over the keys of a position, or max: the largest one only.
        key_weights: m, broadcastable to (B, H_kv, M, S) with S the cached tokens and these; 0 removes a key.
        normalize: divide by the sum of weights; false is kernelized attention.
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document.
        initial_state: cache of the tokens before these.
        backend: reference, chunked or triton.

    Returns:
        (B, H, N, D) in the dtype of v, and the cache including these tokens. The output of a token that sees nothing
        is 0.

    Raises:
        ValueError: invalid shapes, dtypes, devices or names; the message names the argument.
    """
    check_choice("join", join, ("sum", "max"))
    cross = not causal and isinstance(positions, int)
    k = _with_components(q, k, v, cross)
    cached = 0
    if initial_state is not None:
        check_cached("initial_state", initial_state, k, v)
        cached = initial_state.keys.shape[3]
        k = torch.cat([initial_state.keys, k], 3)
        v = torch.cat([initial_state.values, v], 2)
    options = _weight_options(similarity, variances, join, normalize, k)
    spans = _all_keys(q, k) if cross else _spans(q, positions, cached, causal)
    out = choose(IMPLEMENTATIONS, backend)(
        q, k, v, options=options, key_weights=_key_weights(key_weights, k), spans=spans
    )
    return out, WeightedState(k, v)


@torch.no_grad()
def responsibilities(
    q: Tensor,
    k: Tensor,
    *,
    similarity: Similarity = "gaussian",
    variances: Sequence[float] | None = None,
    key_weights: Tensor | None = None,
    query_mask: Tensor | None = None,
    causal: bool = True,
    positions: Positions = 0,
    backend: str | None = None,
) -> Tensor:
    """Responsibilities for the M-step: each key's share of its position's weight, summed over queries that see it.

    Arguments as in `weighted_attention`; query_mask: (B, N) bool, False excludes a query. Returns (B, H_kv, M, N),
    float32 or better; sums over M are the number of (query head, query) pairs that see the position.
    """
    k = _with_components(q, k, k if k.dim() == 4 else k[:, :, 0])
    options = _weight_options(similarity, variances, "sum", True, k)
    spans = _spans(q, positions, 0, causal)
    if query_mask is not None:
        spans = Spans(spans.first, spans.last.masked_fill(~query_mask, -1))
    return choose(RESPONSIBILITIES, backend)(
        q, k, options=options, key_weights=_key_weights(key_weights, k), spans=spans
    )


def _with_components(q: Tensor, k: Tensor, v: Tensor, cross: bool = False) -> Tensor:
    if k.dim() == 4:
        k = k[:, :, None]
    if k.dim() != 5 or k.shape[2] == 0:
        raise ValueError(
            f"k has shape {tuple(k.shape)}; "
            "expected (batch, heads, tokens, width) or (batch, heads, keys, tokens, width)"
        )
    check_heads(q, k[:, :, 0], v, cross=cross)
    return k


def _weight_options(
    similarity: Similarity, variances: Sequence[float] | None, join: Join, normalize: bool, k: Tensor
) -> WeightOptions:
    check_choice("similarity", similarity, ("softmax", "gaussian"))
    keys = k.shape[2]
    if variances is None:
        return WeightOptions(similarity, (1.0,) * keys, join, normalize)
    if similarity != "gaussian" or len(variances) != keys or min(variances) <= 0:
        raise ValueError(
            f"variances={list(variances)} with {similarity} and {keys} keys at a position; "
            "expected one positive number per key, for gaussian only"
        )
    return WeightOptions(similarity, tuple(variances), join, normalize)


def _key_weights(key_weights: Tensor | None, k: Tensor) -> Tensor:
    if key_weights is None:
        return k.new_ones(k.shape[:4], dtype=accum_dtype(k.dtype))
    return expand("key_weights", key_weights.to(accum_dtype(k.dtype)), k.shape[:4])


def _all_keys(q: Tensor, k: Tensor) -> Spans:
    first = torch.zeros(1, q.shape[2], dtype=torch.int64, device=q.device)
    return Spans(first, first + k.shape[3] - 1)


def _spans(q: Tensor, positions: Positions, cached: int, causal: bool) -> Spans:
    check_positions(positions, q)
    return document_spans(positions, q, cached, causal)
