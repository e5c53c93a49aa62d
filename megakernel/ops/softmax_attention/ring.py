"""Softmax attention over a sequence in shards, the keys and values going round (ring attention, Liu et al. 2023).

Each of P processes keeps its queries. The shards of keys and values pass from neighbour to neighbour, P - 1 times, and
are met where they come by: sums over disjoint keys add, so a query has seen its sequence when the last shard has. The
next shard is under way while the present one is used.

Backward sends the keys and values round again and weighs again, given each query's normalizer. The gradients of a
shard's keys and values travel behind it, in float32, growing at every process, and come home after P - 1 hops.

Bytes that each process sends, for B sequences with shards of N tokens, H_kv key heads of width d and values of width D
in numbers of s bytes:

    forward     (P - 1) B N (H_kv (d + D) s + e)
    backward    (P - 1) B N (H_kv (d + D) (s + w) + e)

w = 4 (8 for float64). e = 8 for packed sequences, whose keys say which document they are of, and 1 more with a key
mask. Query heads that share a key head cost nothing. Unlike a state's, this traffic grows with the tokens; the work
per shard grows with their square, so that long shards hide it.

Causal sequences are not balanced: process r weighs r + 1 of the P shards, the first waits for the last, and the layer
takes about as long as one that is not causal. Shards are contiguous because kernel states and near windows want them
so; dealing out a sequence's ends and middles together would balance this layer alone.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads, check_positions
from megakernel.ops.documents import Positions
from megakernel.ops.partial_output import empty_partial_output, log_normalizer, normalized
from megakernel.ops.softmax_attention.partial import (
    OutputGradient,
    Seen,
    add_gradients,
    add_sums,
)
from megakernel.ops.softmax_attention.spans import spans_among


class PendingTensors(Protocol):
    """Tensors under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """Those of the left neighbour, of the shapes and dtypes of the ones handed in."""
        ...


class Ring(Protocol):
    """Shard `rank` of `size` equal contiguous shards of every sequence, between two neighbours."""

    rank: int
    size: int

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingTensors:
        """Begin to hand tensors to the next shard, the last to the first; not differentiable."""
        ...


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
    """`softmax_attention` of whole sequences for the queries of one shard, by rotation of keys and values.

    Every shard calls this with the same shapes, dtypes and options, and runs the same backward. Differentiable once.

    Args:
        q: (B, H, N, d), this shard's queries.
        k: (B, H_kv, N, d), this shard's keys, H a multiple of H_kv.
        v: (B, H_kv, N, D).
        ring: which shard this is, and its neighbours.
        causal: token i sees tokens j <= i of its document; otherwise all tokens of its document.
        window: of causal attention, token i sees tokens j > i - window alone; None: all. Shards out of sight pass by.
        positions: (B, N) positions within documents, or any number for sequences that hold one document each.
        key_mask: (B, N) bool, False removes a key.

    Returns:
        (B, H, N, D). A token that sees nothing gets 0.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, naming the argument.
    """
    check_heads(q, k, v)
    rows = q.unflatten(1, (k.shape[1], -1))
    if not isinstance(positions, Tensor):
        return _RingAttention.apply(rows, k, v, None, key_mask, causal, window, ring).flatten(1, 2)
    check_positions(positions, q)
    # Where a token's document starts in the whole sequence: alike for its tokens in all shards, and increasing.
    places = torch.arange(q.shape[2], device=q.device) + ring.rank * q.shape[2]
    return _RingAttention.apply(rows, k, v, places - positions, key_mask, causal, window, ring).flatten(1, 2)


class _Keys(NamedTuple):
    """What goes round."""

    keys: Tensor
    values: Tensor
    documents: Tensor | None
    """(B, N) int64; None: each sequence is one document."""
    mask: Tensor | None

    def start(self, ring: Ring) -> PendingTensors:
        return ring.start_rotation(tuple(x for x in self if x is not None))

    def replaced(self, tensors: tuple[Tensor, ...]) -> "_Keys":
        """These of another shard, which has the same of them."""
        rest = list(tensors[2:])
        documents = None if self.documents is None else rest.pop(0)
        return _Keys(tensors[0], tensors[1], documents, None if self.mask is None else rest.pop(0))


def _arrivals(ring: Ring, mine: _Keys, causal: bool, window: int | None) -> Iterator[tuple[int, Seen | None]]:
    """Every shard's number, mine first, and what my queries see of its keys; None: nothing.

    The next shard is under way while the caller has one.
    """
    here = mine
    for hop in range(ring.size):
        source = (ring.rank - hop) % ring.size
        coming = here.start(ring) if hop < ring.size - 1 else None
        out_of_sight = causal and source > ring.rank
        yield source, None if out_of_sight else _seen(ring, source, mine, here, causal, window)
        if coming is not None:
            here = here.replaced(coming.wait())


def _seen(ring: Ring, source: int, mine: _Keys, theirs: _Keys, causal: bool, window: int | None) -> Seen:
    length = mine.keys.shape[2]
    if mine.documents is None or theirs.documents is None:
        documents = others = torch.zeros(1, length, dtype=torch.int64, device=mine.keys.device)
    else:
        documents, others = mine.documents, theirs.documents
    spans = spans_among(documents, others, (ring.rank - source) * length if causal else None, window)
    own = causal and window is None and source == ring.rank and mine.documents is None
    return Seen(theirs.keys, theirs.values, spans, theirs.mask, own)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, documents, key_mask, causal, window, ring):
        total = empty_partial_output(q, v.shape[-1])
        for _, seen in _arrivals(ring, _Keys(k, v, documents, key_mask), causal, window):
            if seen is not None:
                add_sums(total, q, seen)
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
        of_queries = torch.zeros_like(q, dtype=dtype)
        travelling = None
        for source, seen in _arrivals(ring, _Keys(k, v, documents, key_mask), ctx.causal, ctx.window):
            of_keys, of_values = (torch.zeros_like(x, dtype=dtype) for x in (k, v))
            if seen is not None:
                add_gradients((of_queries, of_keys, of_values), q, seen, gradient)
            if source == ring.rank:
                mine = of_keys, of_values
                continue
            # What the shards between found for these keys comes one hop behind the keys themselves.
            travelling = ring.start_rotation(_joined((of_keys, of_values), travelling))
        of_keys, of_values = _joined(mine, travelling)
        return of_queries.to(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype), *[None] * 5


def _joined(found: tuple[Tensor, ...], coming: PendingTensors | None) -> tuple[Tensor, ...]:
    """`found`, with what arrives added in place."""
    if coming is not None:
        for part, others in zip(found, coming.wait(), strict=True):
            part += others
    return found
