"""Softmax attention over a subset of keys: partial sums that add to those over other keys, and their gradients.

Fused kernels process rectangles in which all queries see all keys, or the causal diagonal; the rest runs as tiles of
queries and keys, so that few weights are in memory at once. Queries are (B, H_kv, G, N, d), grouped by key head, and
keys are never repeated.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.partial_output import PartialOutput, add, with_ones
from megakernel.ops.softmax_attention import fused
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.state import EMPTY
from megakernel.ops.tensors import accum_dtype

QUERIES = 256
"""Queries of one block."""

KEYS = 512
"""Keys of one block."""


Pairs = Literal["all", "causal", "some"]
"""Which pairs of queries and keys are visible; some: those of spans and mask."""


class VisibleKeys(NamedTuple):
    """A subset of keys, and the queries that see them."""

    keys: Tensor
    """(B, H_kv, M, d)"""

    values: Tensor
    """(B, H_kv, M, D)"""

    spans: Spans
    """The interval of these M keys that each query sees."""

    mask: Tensor | None
    """(B, M) bool, False removes a key."""

    pairs: Pairs = "some"
    """The visible pairs, as far as known without reading spans from a GPU; causal: the keys are the queries' tokens."""

    def visible(self, queries: slice, keys: slice) -> Tensor:
        """(B, 1, 1, n, m) bool."""
        visible = self.spans.mask(queries, keys.start, keys.stop)
        if self.mask is not None:
            visible = visible & self.mask[:, None, keys]
        return visible[:, None, None]


class OutputGradient(NamedTuple):
    """The gradient of the output, and what else the backward of each tile needs."""

    grad: Tensor
    """(B, H_kv, G, N, D): dO, of the normalized output."""

    out: Tensor
    """(B, H_kv, G, N, D): O."""

    normalizer: Tensor
    """(B, H_kv, G, N): log-sum-exp over all keys."""

    mean: Tensor
    """(B, H_kv, G, N): delta, the inner product of O and dO."""


def add_sums(total: PartialOutput, q: Tensor, subset: VisibleKeys) -> None:
    """Add the sums of queries q (B, H_kv, G, N, d) over these keys to `total`, in place."""
    assert total.log_scale is not None
    for queries, keys, pairs in _tiles(q, subset):
        rows, k, v = q[_at(queries)], subset.keys[:, :, keys], subset.values[:, :, keys]
        if pairs == "some":
            sums = _tile_sums(rows, k, v, subset.visible(queries, keys))
        else:
            out, log_sum_exp = fused.attend(rows.flatten(1, 2), k, v, pairs == "causal")
            out = with_ones(out.to(total.values.dtype))
            sums = PartialOutput(out.view(*rows.shape[:-1], -1), log_sum_exp.view(rows.shape[:-1]))
        values, log_scale = total.values[_at(queries)], total.log_scale[_at(queries)]
        sums = add(PartialOutput(values, log_scale), sums)
        values.copy_(sums.values)
        log_scale.copy_(sums.scale_or_zero)


def add_gradients(
    totals: tuple[Tensor, Tensor, Tensor], q: Tensor, subset: VisibleKeys, gradient: OutputGradient
) -> None:
    """Add these keys' contributions to the gradients `totals` of queries, keys and values, in place."""
    for queries, keys, pairs in _tiles(q, subset):
        rows, k, v = q[_at(queries)], subset.keys[:, :, keys], subset.values[:, :, keys]
        tile = OutputGradient(*(x[_at(queries)] for x in gradient))
        if pairs == "some":
            parts = _tile_gradients(rows, k, v, subset.visible(queries, keys), tile)
        else:
            heads, grad, out, log_sum_exp = (
                x.flatten(1, 2) for x in (rows, tile.grad, tile.out, tile.normalizer)
            )
            parts = fused.gradients(grad, heads, k, v, out, log_sum_exp, pairs == "causal")
        slices = (totals[0][_at(queries)], totals[1][:, :, keys], totals[2][:, :, keys])
        for total, part in zip(slices, parts, strict=True):
            total += part.view(total.shape)


def _tiles(q: Tensor, subset: VisibleKeys) -> Iterator[tuple[slice, slice, Pairs]]:
    """Tiles of queries and keys, and which of their pairs are visible."""
    if subset.mask is not None or not fused.supports(q.flatten(1, 2), subset.keys, subset.values):
        for queries, keys in subset.spans.blocks(QUERIES, KEYS):
            yield queries, keys, "some"
    elif subset.pairs != "some":
        yield slice(None), slice(None), subset.pairs
    else:
        for queries, keys, whole in subset.spans.rectangles(QUERIES, KEYS):
            yield queries, keys, "all" if whole else "some"


def _tile_sums(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> PartialOutput:
    scores = _scores(q, k).masked_fill_(~visible, -torch.inf)
    largest = scores.amax(-1).clamp(min=EMPTY)
    weights = torch.exp_(scores.sub_(largest[..., None]))
    values = with_ones(v.to(weights.dtype))
    return PartialOutput((weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4]), largest)


def _tile_gradients(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, gradient: OutputGradient
) -> tuple[Tensor, Tensor, Tensor]:
    """Contributions of these pairs to the gradients of q, k and v.

    With normalized weights p = exp(s - lse): dV = p^T dO, and scores s have the gradient ds = p (dO V^T - delta). Both
    are sums over pairs, wherever the query's other keys are.
    """
    rows, k, v, grad = (x.to(accum_dtype(q.dtype)) for x in (q, k, v, gradient.grad))
    weights = torch.exp_(_scores(rows, k).sub_(gradient.normalizer[..., None]))
    weights = weights.masked_fill_(~visible, 0.0).flatten(2, 3)
    rows, grad = rows.flatten(2, 3), grad.flatten(2, 3)
    dscores = (grad @ v.transpose(-1, -2)).sub_(gradient.mean.flatten(2, 3)[..., None])
    dscores.mul_(weights).mul_(q.shape[-1] ** -0.5)
    return dscores @ k, dscores.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ grad


def _at(queries: slice) -> tuple[slice, ...]:
    """An index of these queries in (B, H_kv, G, N, ...)."""
    return (slice(None), slice(None), slice(None), queries)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H_kv, G, n, d) and (B, H_kv, m, d) -> q.k / sqrt(d), (B, H_kv, G, n, m) in float32 or better."""
    rows = q.to(accum_dtype(q.dtype)).flatten(2, 3) * q.shape[-1] ** -0.5
    return (rows @ k.to(rows.dtype).transpose(-1, -2)).unflatten(2, q.shape[2:4])
