"""Softmax attention over some of a row's keys: sums that add to those over other keys, and their gradients.

Fused kernels take keys that are visible without exception; elsewhere blocks of queries meet blocks of keys, so that few
weights exist at once. Query heads that share a key head are rows beside each other, (B, H_kv, G, N, d), and keys are
never repeated.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import wide
from megakernel.ops.softmax_attention import fused
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.state import EMPTY
from megakernel.ops.sums import Sums, add

QUERIES = 256
"""Queries of one block."""

KEYS = 512
"""Keys of one block."""


class Seen(NamedTuple):
    """Some keys of rows, and who sees them."""

    keys: Tensor
    """(B, H_kv, M, d)"""

    values: Tensor
    """(B, H_kv, M, D)"""

    spans: Spans
    """Which of these M keys each query sees."""

    mask: Tensor | None
    """(B, M) bool, False removes a key."""

    pairs: Literal["all", "causal", "some"]
    """What the spans and the mask amount to: a query sees all M = N keys, those up to its own place, or others."""

    def visible(self, queries: slice, keys: slice) -> Tensor:
        """(B, 1, 1, n, m) bool."""
        seen = self.spans.mask(queries, keys.start, keys.stop)
        if self.mask is not None:
            seen = seen & self.mask[:, None, keys]
        return seen[:, None, None]


class Pull(NamedTuple):
    """What the gradient of an output asks of every pair of a query and a key."""

    grad: Tensor
    """(B, H_kv, G, N, D), of the normalized output."""

    out: Tensor
    """(B, H_kv, G, N, D), that output."""

    normalizer: Tensor
    """(B, H_kv, G, N), `log_normalizer` of the sums over all keys."""

    mean: Tensor
    """(B, H_kv, G, N), the inner product of the output and its gradient."""


def no_sums(q: Tensor, value_dim: int) -> Sums:
    """The sums over no keys of queries (B, H_kv, G, N, d), in float32 or better."""
    values = q.new_zeros(*q.shape[:-1], value_dim + 1, dtype=wide(q.dtype))
    return Sums(values, values.new_full(values.shape[:-1], EMPTY))


def log_normalizer(sums: Sums) -> Tensor:
    """Logarithm of each query's sum of weights, (B, H_kv, G, N); `EMPTY` where it saw nothing."""
    weights = sums.values[..., -1]
    return sums.scale_or_zero + weights.masked_fill(weights == 0, 1.0).log()


def add_sums(total: Sums, q: Tensor, seen: Seen) -> None:
    """Add to `total`, in place, what these keys give queries q (B, H_kv, G, N, d)."""
    heads = q.flatten(1, 2)
    if seen.pairs != "some" and fused.takes(heads, seen.keys, seen.values):
        means, log_sums = fused.attend(heads, seen.keys, seen.values, seen.pairs == "causal")
        ones = F.pad(means.to(total.values.dtype), (0, 1), value=1.0)
        _put(total, ..., Sums(ones.view_as(total.values), log_sums.view(q.shape[:-1])))
        return
    for queries, keys in seen.spans.blocks(QUERIES, KEYS):
        scores = _scores(q[_at(queries)], seen.keys[:, :, keys])
        scores.masked_fill_(~seen.visible(queries, keys), -torch.inf)
        largest = scores.amax(-1).clamp(min=EMPTY)
        weights = torch.exp_(scores.sub_(largest[..., None]))
        values = F.pad(seen.values[:, :, keys].to(scores.dtype), (0, 1), value=1.0)
        found = (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])
        _put(total, _at(queries), Sums(found, largest))


def add_gradients(totals: tuple[Tensor, Tensor, Tensor], q: Tensor, seen: Seen, pull: Pull) -> None:
    """Add to `totals`, the gradients of queries, keys and values in place, what comes of these pairs.

    With p = exp(s - normalizer), the weights as they were after the division: dV = p^T grad, and scores have the
    gradient ds = p (grad V^T - mean). Both are sums over pairs, whoever holds the row's other keys.
    """
    of_queries, of_keys, of_values = totals
    heads = q.flatten(1, 2)
    if seen.pairs != "some" and fused.takes(heads, seen.keys, seen.values):
        grad, out, log_sums = (x.flatten(1, 2) for x in (pull.grad, pull.out, pull.normalizer))
        parts = fused.gradients(grad, heads, seen.keys, seen.values, out, log_sums, seen.pairs == "causal")
        for total, part in zip(totals, parts):
            total += part.view_as(total)
        return
    for queries, keys in seen.spans.blocks(QUERIES, KEYS):
        at = _at(queries)
        places = q[at], seen.keys[:, :, keys], seen.values[:, :, keys], pull.grad[at]
        rows, some, values, grad = (x.to(wide(q.dtype)) for x in places)
        weights = torch.exp_(_scores(rows, some).sub_(pull.normalizer[at][..., None]))
        weights = weights.masked_fill_(~seen.visible(queries, keys), 0.0).flatten(2, 3)
        grad = grad.flatten(2, 3)
        of_values[:, :, keys] += weights.transpose(-1, -2) @ grad
        slopes = (grad @ values.transpose(-1, -2)).sub_(pull.mean[at].flatten(2, 3)[..., None])
        slopes.mul_(weights).mul_(q.shape[-1] ** -0.5)
        of_queries[at] += (slopes @ some).unflatten(2, q[at].shape[2:4])
        of_keys[:, :, keys] += slopes.transpose(-1, -2) @ rows.flatten(2, 3)


def _at(queries: slice) -> tuple[slice, ...]:
    """These of (B, H_kv, G, N, ...)."""
    return (slice(None), slice(None), slice(None), queries)


def _put(total: Sums, at: Any, found: Sums) -> None:
    assert total.log_scale is not None
    both = add(Sums(total.values[at], total.log_scale[at]), found)
    total.values[at], total.log_scale[at] = both.values, both.scale_or_zero


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H_kv, G, n, d) and (B, H_kv, m, d) -> q.k / sqrt(d), (B, H_kv, G, n, m) in float32 or better."""
    rows = q.to(wide(q.dtype)).flatten(2, 3) * q.shape[-1] ** -0.5
    return (rows @ k.to(rows.dtype).transpose(-1, -2)).unflatten(2, q.shape[2:4])
