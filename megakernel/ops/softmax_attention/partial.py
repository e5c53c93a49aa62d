"""Softmax attention over some of a sequence's keys: sums that add to those over other keys, and their gradients.

Fused kernels take queries that see the same keys; elsewhere blocks of queries meet blocks of keys, so that few weights
exist at once. Query heads that share a key head are rows beside each other, (B, H_kv, G, N, d), and keys are
never repeated.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.partial_output import PartialOutput, add
from megakernel.ops.softmax_attention import fused
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.state import EMPTY

QUERIES = 256
"""Queries of one block."""

KEYS = 512
"""Keys of one block."""


class Seen(NamedTuple):
    """Some keys of sequences, and who sees them."""

    keys: Tensor
    """(B, H_kv, M, d)"""

    values: Tensor
    """(B, H_kv, M, D)"""

    spans: Spans
    """Which of these M keys each query sees."""

    mask: Tensor | None
    """(B, M) bool, False removes a key."""

    own: bool = False
    """The spans, known without a look: these are the queries' own places, and each sees those up to its own."""

    def visible(self, queries: slice, keys: slice) -> Tensor:
        """(B, 1, 1, n, m) bool."""
        seen = self.spans.mask(queries, keys.start, keys.stop)
        if self.mask is not None:
            seen = seen & self.mask[:, None, keys]
        return seen[:, None, None]


class OutputGradient(NamedTuple):
    """The gradient of an output, and what the backward of every pair of a query and a key needs beside it."""

    grad: Tensor
    """(B, H_kv, G, N, D), of the normalized output."""

    out: Tensor
    """(B, H_kv, G, N, D), that output."""

    normalizer: Tensor
    """(B, H_kv, G, N), `log_normalizer` of the sums over all keys."""

    mean: Tensor
    """(B, H_kv, G, N), the inner product of the output and its gradient."""


def add_sums(total: PartialOutput, q: Tensor, seen: Seen) -> None:
    """Add to `total`, in place, what these keys give queries q (B, H_kv, G, N, d)."""
    assert total.log_scale is not None
    for queries, keys, how in _blocks(q, seen):
        rows, k, v = q[_at(queries)], seen.keys[:, :, keys], seen.values[:, :, keys]
        if how == "some":
            found = _block_sums(rows, k, v, seen.visible(queries, keys))
        else:
            means, log_sums = fused.attend(rows.flatten(1, 2), k, v, how == "causal")
            ones = F.pad(means.to(total.values.dtype), (0, 1), value=1.0)
            found = PartialOutput(ones.view(*rows.shape[:-1], -1), log_sums.view(rows.shape[:-1]))
        values, log_scale = total.values[_at(queries)], total.log_scale[_at(queries)]
        both = add(PartialOutput(values, log_scale), found)
        values.copy_(both.values)
        log_scale.copy_(both.scale_or_zero)


def add_gradients(
    totals: tuple[Tensor, Tensor, Tensor], q: Tensor, seen: Seen, gradient: OutputGradient
) -> None:
    """Add to `totals`, the gradients of queries, keys and values in place, what comes of these pairs."""
    for queries, keys, how in _blocks(q, seen):
        rows, k, v = q[_at(queries)], seen.keys[:, :, keys], seen.values[:, :, keys]
        mine = OutputGradient(*(x[_at(queries)] for x in gradient))
        if how == "some":
            parts = _block_gradients(rows, k, v, seen.visible(queries, keys), mine)
        else:
            heads, grad, out, log_sums = (
                x.flatten(1, 2) for x in (rows, mine.grad, mine.out, mine.normalizer)
            )
            parts = fused.gradients(grad, heads, k, v, out, log_sums, how == "causal")
        places = (totals[0][_at(queries)], totals[1][:, :, keys], totals[2][:, :, keys])
        for total, part in zip(places, parts, strict=True):
            total += part.view(total.shape)


def _blocks(q: Tensor, seen: Seen) -> Iterator[tuple[slice, slice, Literal["all", "causal", "some"]]]:
    """Queries, keys, and how they see each other: all, causally, or as the spans and the mask say."""
    if seen.mask is not None or not fused.takes(q.flatten(1, 2), seen.keys, seen.values):
        for queries, keys in seen.spans.blocks(QUERIES, KEYS):
            yield queries, keys, "some"
    elif seen.own:
        yield slice(None), slice(None), "causal"
    else:
        for queries, keys, whole in seen.spans.rectangles(QUERIES, KEYS):
            yield queries, keys, "all" if whole else "some"


def _block_sums(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> PartialOutput:
    scores = _scores(q, k).masked_fill_(~visible, -torch.inf)
    largest = scores.amax(-1).clamp(min=EMPTY)
    weights = torch.exp_(scores.sub_(largest[..., None]))
    values = F.pad(v.to(weights.dtype), (0, 1), value=1.0)
    return PartialOutput((weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4]), largest)


def _block_gradients(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, gradient: OutputGradient
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v that come of these pairs.

    With p = exp(s - normalizer), the weights as they were after the division: dV = p^T grad, and scores have the
    gradient ds = p (grad V^T - mean). Both are sums over pairs, whoever holds the query's other keys.
    """
    rows, k, v, grad = (x.to(accum_dtype(q.dtype)) for x in (q, k, v, gradient.grad))
    weights = torch.exp_(_scores(rows, k).sub_(gradient.normalizer[..., None]))
    weights = weights.masked_fill_(~visible, 0.0).flatten(2, 3)
    rows, grad = rows.flatten(2, 3), grad.flatten(2, 3)
    slopes = (grad @ v.transpose(-1, -2)).sub_(gradient.mean.flatten(2, 3)[..., None])
    slopes.mul_(weights).mul_(q.shape[-1] ** -0.5)
    return slopes @ k, slopes.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ grad


def _at(queries: slice) -> tuple[slice, ...]:
    """These of (B, H_kv, G, N, ...)."""
    return (slice(None), slice(None), slice(None), queries)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H_kv, G, n, d) and (B, H_kv, m, d) -> q.k / sqrt(d), (B, H_kv, G, n, m) in float32 or better."""
    rows = q.to(accum_dtype(q.dtype)).flatten(2, 3) * q.shape[-1] ** -0.5
    return (rows @ k.to(rows.dtype).transpose(-1, -2)).unflatten(2, q.shape[2:4])
