"""Ring attention: softmax attention over context-parallel shards that rotate keys and values (Liu et al. 2023).

Each of P processes keeps its queries, and the shards of keys and values are passed from neighbor to neighbor P - 1
times. Partial sums over disjoint keys add, so each query's sums are complete after the last hop. Communication of the
next shard overlaps the computation on the current one.

Backward rotates keys and values again and recomputes weights from each query's log-sum-exp. The gradients of a shard's
keys and values follow it one hop behind, accumulate in float32 at every process, and return after P - 1 hops.

Bytes that each process sends, for B sequences with shards of N tokens, H_kv key heads of width d and values of width D
in elements of s bytes:

    forward     (P - 1) B N (H_kv (d + D) s + e)
    backward    (P - 1) B N (H_kv (d + D) (s + w) + e)

w = 4 (8 for float64). e = 8 for packed sequences, whose keys are sent with their document's start, and 1 more with a
key mask. The number of query heads does not matter. Unlike the traffic of states, this grows with the tokens; compute
per shard grows with their square, so it hides the traffic of long shards.

Causal attention is not balanced: process r computes r + 1 of the P shards, the first waits for the last, and the layer
takes about as long as without causality. Shards are contiguous because kernel states and local windows need that; a
zigzag order would balance this layer only.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads, check_positions
from megakernel.ops.documents import Positions
from megakernel.ops.partial_output import empty_partial_output, log_normalizer, normalized
from megakernel.ops.ring import FollowingGradients, Ring, visits
from megakernel.ops.softmax_attention.partial import (
    OutputGradient,
    Pairs,
    VisibleKeys,
    add_gradients,
    add_sums,
)
from megakernel.ops.softmax_attention.spans import cross_shard_spans


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ring: Ring,
    causal: bool = True,
    window: int | None = None,
    positions: Positions = 0,
    key_mask: Tensor | None = None,
) -> Tensor:
    """`softmax_attention` over whole sequences for the queries of one shard.

    All shards must call this with the same shapes, dtypes and options, and run the same backward. Differentiable once.

    Args:
        q: (B, H, N, d), this shard's queries.
        k: (B, H_kv, N, d), this shard's keys, H a multiple of H_kv.
        v: (B, H_kv, N, D).
        ring: this shard and its neighbors.
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        window: for causal attention, token i sees only tokens j > i - window; None: all. All shards still rotate.
        positions: (B, N) positions within documents, or any int if each sequence holds one document.
        key_mask: (B, N) bool, False removes a key.

    Returns:
        (B, H, N, D). The output of a token that sees nothing is 0.

    Raises:
        ValueError: invalid shapes, dtypes or devices; the message names the argument.
    """
    check_heads(q, k, v)
    rows = q.unflatten(1, (k.shape[1], -1))
    if not isinstance(positions, Tensor):
        return _RingAttention.apply(rows, k, v, None, key_mask, causal, window, ring).flatten(1, 2)
    check_positions(positions, q)
    # The index of the document's first token in the whole sequence identifies the document on all shards.
    indices = torch.arange(q.shape[2], device=q.device) + ring.rank * q.shape[2]
    return _RingAttention.apply(rows, k, v, indices - positions, key_mask, causal, window, ring).flatten(1, 2)


class _RotatingKeys(NamedTuple):
    """The tensors that rotate."""

    keys: Tensor
    values: Tensor
    documents: Tensor | None
    """(B, N) int64: start of each token's document; None: each sequence is one document."""
    mask: Tensor | None

    @property
    def sent(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self if x is not None)

    def replaced(self, tensors: tuple[Tensor, ...]) -> "_RotatingKeys":
        """The received tensors of another shard, which has the same optional ones."""
        rest = iter(tensors)
        return _RotatingKeys._make(None if x is None else next(rest) for x in self)


def _rotate(
    ring: Ring, own: _RotatingKeys, causal: bool, window: int | None
) -> Iterator[tuple[int, VisibleKeys | None]]:
    """All shards, this one first: the rank, and the keys that this rank's queries see; None: none."""
    for source, tensors in visits(ring, own.sent):
        invisible, other = causal and source > ring.rank, own.replaced(tensors)
        yield source, None if invisible else _visible_keys(ring, source, own, other, causal, window)


def _visible_keys(
    ring: Ring, source: int, own: _RotatingKeys, other: _RotatingKeys, causal: bool, window: int | None
) -> VisibleKeys:
    """The keys `other` of shard `source` for the queries of this shard, whose keys are `own`."""
    length = own.keys.shape[2]
    pairs: Pairs = "some"
    if own.documents is None or other.documents is None:
        if window is None:
            pairs = "causal" if causal and source == ring.rank else "all"
        query_documents = key_documents = torch.zeros(1, length, dtype=torch.int64, device=own.keys.device)
    else:
        query_documents, key_documents = own.documents, other.documents
    ahead = (ring.rank - source) * length if causal else None
    spans = cross_shard_spans(query_documents, key_documents, ahead, window)
    return VisibleKeys(other.keys, other.values, spans, other.mask, pairs)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, documents, key_mask, causal, window, ring):
        total = empty_partial_output(q, v.shape[-1])
        for _, subset in _rotate(ring, _RotatingKeys(k, v, documents, key_mask), causal, window):
            if subset is not None:
                add_sums(total, q, subset)
        out = normalized(total)
        ctx.causal, ctx.window, ctx.ring = causal, window, ring
        ctx.save_for_backward(q, k, v, documents, key_mask, out, log_normalizer(total))
        return out.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, documents, key_mask, out, normalizer = ctx.saved_tensors
        ring, dtype = ctx.ring, out.dtype
        gradient = OutputGradient(grad, out, normalizer, mean=(grad.to(dtype) * out).sum(-1))
        dq = torch.zeros_like(q, dtype=dtype)
        following = FollowingGradients(ring)
        for _, subset in _rotate(ring, _RotatingKeys(k, v, documents, key_mask), ctx.causal, ctx.window):
            dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
            if subset is not None:
                add_gradients((dq, dk, dv), q, subset, gradient)
            following.add((dk, dv))
        dk, dv = following.returned()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 5
