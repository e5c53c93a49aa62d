"""Softmax attention, the quadratic baseline: softmax(q k^T / sqrt(d)) v."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads, check_positions
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions, position_rows
from megakernel.ops.softmax_attention import blocked, reference
from megakernel.ops.softmax_attention.spans import document_spans

IMPLEMENTATIONS = {"chunked": blocked.attend, "reference": reference.attend}
"""Backend -> implementation."""


class SoftmaxState(NamedTuple):
    """The key-value cache: grows with the sequence."""

    keys: Tensor
    """(B, H_kv, S, d) as they were attended, rotated where keys are."""

    values: Tensor
    """(B, H_kv, S, D)"""


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    positions: Positions = 0,
    key_mask: Tensor | None = None,
    mass: Tensor | None = None,
    initial_state: SoftmaxState | None = None,
    backend: str | None = None,
) -> tuple[Tensor, SoftmaxState]:
    """Attention with weights exp(q.k / sqrt(d)), normalized.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D). Where nothing is causal or packed, keys and values may be another number of tokens than
            the queries.
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        window: of causal attention, token i sees tokens j > i - window alone; None: all.
        positions: (B, N) positions within documents, or the position of the first token of rows that hold one
            document each.
        key_mask: (B, N) bool, False removes a key; not together with a state.
        mass: (B, N) multiplies the weight of a key, which counts so many times; 0 removes it. For keys of whole
            rows only.
        initial_state: cache of the tokens before these.
        backend: reference or chunked.

    Returns:
        (B, H, N, D), and the cache with these tokens: with a window those that the next token sees. A token that sees
        nothing gets 0.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, k, v, cross=not causal and isinstance(positions, int))
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} with causal={causal}; expected at least 1, and causal=True")
    cached = 0
    spans = None
    if isinstance(positions, Tensor):
        check_positions(positions, q)
    if initial_state is not None:
        cached = initial_state.keys.shape[2]
        k, v = torch.cat([initial_state.keys, k], 2), torch.cat([initial_state.values, v], 2)
    # One new token after its own cache, or uncut rows, need no mask: the fused kernels are fastest without
    # one.
    is_cut = window is not None and k.shape[2] > window
    if isinstance(positions, Tensor) or (cached and q.shape[2] > 1) or is_cut:
        spans = document_spans(position_rows(positions, q.shape[2], q.device), cached, causal, window)
    out = choose(IMPLEMENTATIONS, backend)(
        q, k, v, spans=spans, causal=causal and cached == 0, key_mask=key_mask, mass=mass
    )
    forgotten = 0 if window is None else max(0, k.shape[2] - window + 1)
    return out, SoftmaxState(k[:, :, forgotten:], v[:, :, forgotten:])
