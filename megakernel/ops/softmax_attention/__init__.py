"""Softmax attention, softmax(q k^T / sqrt(d)) v: the quadratic baseline."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megakernel.ops.arguments import check_cached, check_heads, check_positions, expand
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions
from megakernel.ops.softmax_attention import packed
from megakernel.ops.softmax_attention.spans import Spans, document_spans
from megakernel.ops.tensors import accum_dtype

BLOCK = 512
"""Queries whose mask is in memory at once."""


class SoftmaxState(NamedTuple):
    """The key-value cache, which grows with the sequence."""

    keys: Tensor
    """(B, H_kv, S, d), rotated if keys are."""

    values: Tensor
    """(B, H_kv, S, D)"""


class SoftmaxInputs(NamedTuple):
    """Validated arguments of a backend other than queries, keys and values."""

    spans: Spans | None
    """The keys that each query sees; None: all keys, or with `causal` those up to its own."""

    causal: bool
    key_mask: Tensor | None
    key_weights: Tensor | None
    softcap: float | None


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    positions: Positions = 0,
    key_mask: Tensor | None = None,
    key_weights: Tensor | None = None,
    initial_state: SoftmaxState | None = None,
    backend: str | None = None,
) -> tuple[Tensor, SoftmaxState]:
    """Attention with normalized weights exp(q.k / sqrt(d)).

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D). If attention is neither causal nor packed, keys and values may have another number of
            tokens than queries.
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        window: for causal attention, token i sees only tokens j > i - window; None: all.
        softcap: c > 0 in weights exp(c tanh(q.k / (c sqrt(d)))); None: exponents are not capped.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document.
        key_mask: (B, keys) bool, False removes a key; not with a state.
        key_weights: broadcastable to (B, keys), multiplies the weight of a key, as if it occurred that often; 0 removes
            it. Only with causal=False, and not with key_mask, packed sequences, softcap or a state.
        initial_state: cache of the tokens before these.
        backend: reference or chunked.

    Returns:
        (B, H, N, D), and the cache including these tokens; with a window, only those that the next token sees. The
        output of a token that sees nothing is 0.

    Raises:
        ValueError: invalid shapes, dtypes, devices or numbers, and arguments that would be ignored; the message names
            the argument.
    """
    check_heads(q, k, v, cross=not causal and isinstance(positions, int))
    check_positions(positions, q)
    if key_mask is not None:
        _check_key_mask(key_mask, k, initial_state)
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} with causal={causal}; expected at least 1, and causal=True")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}; expected a number above 0, or None")
    cached = 0
    spans = None
    if initial_state is not None:
        check_cached("initial_state", initial_state, k, v)
        cached = initial_state.keys.shape[2]
        k, v = torch.cat([initial_state.keys, k], 2), torch.cat([initial_state.values, v], 2)
    # A single token after its document, or unpacked sequences, need no mask, without which fused kernels are fastest.
    visible_k, visible_v = k, v
    if isinstance(positions, int) and causal and q.shape[2] == 1 and key_mask is None:
        visible = min(positions + 1, k.shape[2], window or k.shape[2])
        visible_k, visible_v = k[:, :, -visible:], v[:, :, -visible:]
    else:
        is_cut = window is not None and k.shape[2] > window
        # Only some of PyTorch's kernels are causal and take a mask, and none has a soft cap.
        is_masked = causal and (key_mask is not None or softcap is not None)
        if isinstance(positions, Tensor) or cached or is_cut or is_masked:
            spans = document_spans(positions, q, cached, causal, window)
    if key_weights is not None:
        if causal or key_mask is not None or spans is not None or softcap is not None:
            raise ValueError(
                "key_weights with causal=True, key_mask, packed documents, softcap or a state; "
                "a weight of 0 hides a key"
            )
        key_weights = expand("key_weights", key_weights, (len(k), k.shape[2]))
    inputs = SoftmaxInputs(spans, causal and cached == 0, key_mask, key_weights, softcap)
    out = choose(IMPLEMENTATIONS, backend)(q, visible_k, visible_v, inputs)
    forgotten = 0 if window is None else max(0, k.shape[2] - window + 1)
    return out, SoftmaxState(k[:, :, forgotten:], v[:, :, forgotten:])


def _check_key_mask(key_mask: Tensor, k: Tensor, state: SoftmaxState | None) -> None:
    if state is not None:
        raise ValueError("key_mask next to initial_state; expected one of them")
    expected = (len(k), k.shape[2])
    if key_mask.dtype != torch.bool or tuple(key_mask.shape) != expected:
        raise ValueError(
            f"key_mask is {key_mask.dtype} of shape {tuple(key_mask.shape)}; expected torch.bool of shape {expected}"
        )


def chunked(q: Tensor, k: Tensor, v: Tensor, inputs: SoftmaxInputs) -> Tensor:
    """PyTorch's fused kernels; packed and soft-capped sequences without such a kernel run by blocks of queries."""
    spans, causal, key_mask, key_weights, softcap = inputs
    grouped = q.shape[1] != k.shape[1]
    if spans is None and softcap is None:
        mask = None if key_mask is None else key_mask[:, None, None]
        if key_weights is not None:
            # A finite number for log 0, so that queries without any key get no NaN.
            hidden, logs = key_weights == 0, key_weights.to(accum_dtype(q.dtype))
            logs = logs.clamp(min=torch.finfo(logs.dtype).tiny).log().to(q.dtype)
            mask = logs.masked_fill(hidden, torch.finfo(q.dtype).min / 2)[:, None, None]
            # If no key has weight, all have the same.
            v = v.masked_fill(hidden[:, None, :, None], 0.0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    is_plain = key_mask is None and softcap is None
    if spans is not None and spans.positions is not None and is_plain and packed.supports(q, k, v):
        return packed.attend(q, k, v, spans.positions, spans.window)
    outputs = []
    starts = range(0, q.shape[2], BLOCK)
    bounds = [0] * len(starts), [k.shape[2]] * len(starts)
    if spans is not None and q.shape[2] > 1:
        bounds = spans.bounds(BLOCK)
    for start, low, high in zip(starts, *bounds):
        queries = q[:, :, start : start + BLOCK]
        mask = None if spans is None else spans.mask(slice(start, start + BLOCK), low, high)
        if key_mask is not None:
            real = key_mask[:, None, low:high]
            mask = real if mask is None else mask & real
        mask = None if mask is None else mask[:, None]
        keys, values = k[:, :, low:high], v[:, :, low:high]
        if softcap is not None:
            arguments = (queries, keys, values, mask, softcap)
            if torch.is_grad_enabled():
                # Recomputed in backward: PyTorch has no soft-capped kernel, and saving all weights takes N x N memory.
                outputs.append(checkpoint(masked_attention, *arguments, use_reentrant=False))
            else:
                outputs.append(masked_attention(*arguments))
            continue
        outputs.append(
            F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
        )
    return torch.cat(outputs, 2)


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention outputs (B, H, N, D) in the dtype of q, from the formula, computed in float32 or better.

    visible: (B or 1, 1, N, keys) bool; None: all are.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(accum_dtype(x.dtype)).repeat_interleave(group, 1) for x in (k, v))
    scores = _capped(q.to(k.dtype) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, softcap)
    if visible is None:
        return (scores.softmax(-1) @ v).to(q.dtype)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    # A query that sees nothing is 0 / 0 in the formula and 0 here.
    return (weights.masked_fill(~visible, 0.0) @ v).to(q.dtype)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def reference(q: Tensor, k: Tensor, v: Tensor, inputs: SoftmaxInputs) -> Tensor:
    """From the formula, with one N x N matrix of weights."""
    spans, causal, key_mask, key_weights, softcap = inputs
    group = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    k, v = (x.to(accum_dtype(x.dtype)).repeat_interleave(group, 1) for x in (k, v))
    visible = torch.ones(1, queries, keys, dtype=torch.bool, device=q.device)
    if spans is not None:
        visible = spans.mask(slice(None), 0, keys)
    elif causal:
        visible = visible.tril()
    if key_weights is not None:
        visible = visible & (key_weights > 0)[:, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    scores = _capped(q.to(k.dtype) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, softcap)
    if key_weights is not None:
        scores = scores + key_weights.to(k.dtype).clamp(min=torch.finfo(k.dtype).tiny).log()[:, None, None]
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    # A query that sees nothing is 0 / 0 in the formula and 0 here.
    return (weights.masked_fill(~visible[:, None], 0.0) @ v).to(q.dtype)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
