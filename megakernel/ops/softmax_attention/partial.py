"""Softmax attention over some of a row's keys: sums that add to those over other keys, and their gradients.

Blocks of queries meet blocks of keys, so that few weights exist at once. Query heads that share a key head are rows
beside each other, (B, H_kv, G, N, d), and keys are never repeated.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import wide
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

    mean: Tensor
    """(B, H_kv, G, N), the inner product of the output and its gradient."""

    normalizer: Tensor
    """(B, H_kv, G, N), `log_normalizer` of the sums over all keys."""


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
    log_scale = total.log_scale
    assert log_scale is not None
    for queries, keys in seen.spans.blocks(QUERIES, KEYS):
        scores = _scores(q[:, :, :, queries], seen.keys[:, :, keys])
        scores.masked_fill_(~seen.visible(queries, keys), -torch.inf)
        largest = scores.amax(-1).clamp(min=EMPTY)
        weights = torch.exp_(scores.sub_(largest[..., None]))
        values = F.pad(seen.values[:, :, keys].to(scores.dtype), (0, 1), value=1.0)
        found = (weights.flatten(2, 3) @ values).unflatten(2, weights.shape[2:4])
        both = add(Sums(total.values[:, :, :, queries], log_scale[:, :, :, queries]), Sums(found, largest))
        total.values[:, :, :, queries], log_scale[:, :, :, queries] = both.values, both.scale_or_zero


def add_gradients(totals: tuple[Tensor, Tensor, Tensor], q: Tensor, seen: Seen, pull: Pull) -> None:
    """Add to `totals`, the gradients of queries, keys and values in place, what comes of these pairs.

    With p = exp(s - normalizer), the weights as they were after the division: dV = p^T grad, and scores have the
    gradient ds = p (grad V^T - mean). Both are sums over pairs, whoever holds the row's other keys.
    """
    of_queries, of_keys, of_values = totals
    scale = q.shape[-1] ** -0.5
    for queries, keys in seen.spans.blocks(QUERIES, KEYS):
        at = (slice(None), slice(None), slice(None), queries)
        places = q[at], seen.keys[:, :, keys], seen.values[:, :, keys], pull.grad[at]
        rows, some, values, grad = (x.to(wide(q.dtype)) for x in places)
        weights = torch.exp_(_scores(rows, some).sub_(pull.normalizer[at][..., None]))
        weights = weights.masked_fill_(~seen.visible(queries, keys), 0.0).flatten(2, 3)
        grad = grad.flatten(2, 3)
        of_values[:, :, keys] += weights.transpose(-1, -2) @ grad
        slopes = (grad @ values.transpose(-1, -2)).sub_(pull.mean[at].flatten(2, 3)[..., None])
        slopes.mul_(weights).mul_(scale)
        of_queries[at] += (slopes @ some).unflatten(2, rows.shape[2:4])
        of_keys[:, :, keys] += slopes.transpose(-1, -2) @ rows.flatten(2, 3)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """(B, H_kv, G, n, d) and (B, H_kv, m, d) -> q.k / sqrt(d), (B, H_kv, G, n, m) in float32 or better."""
    rows = q.to(wide(q.dtype)).flatten(2, 3) * q.shape[-1] ** -0.5
    return (rows @ k.to(rows.dtype).transpose(-1, -2)).unflatten(2, q.shape[2:4])
