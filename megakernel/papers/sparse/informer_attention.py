"""Informer's attention: the queries whose weights are the most uneven attend, the others get the mean value.

See docs/formulas.md, 12.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megakernel.ops.arguments import check_heads
from megakernel.ops.dispatch import choose
from megakernel.ops.tensors import accum_dtype

Sampled = Callable[[Tensor], Tensor]
"""Indices of queries (n,) -> indices (B or 1, H, n, U) of real keys, drawn with replacement; U as `limit`.
"""

PAIRS = 2**15
"""Pairs of queries and sampled keys that are scored at once, per sequence and head."""


def chosen_numbers(counts: Tensor, factor: int, top: int | None) -> Tensor:
    """`Informer.number` of every sequence: (B,) of its real tokens (B,); 1 without any."""
    counts = counts.clamp(min=1)
    wanted = factor * counts.double().log().ceil().long() if top is None else torch.full_like(counts, top)
    return wanted.minimum(counts).clamp(min=1)


def informer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sampled: Sampled,
    chosen: Tensor,
    limit: int,
    counts: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of the u queries with the largest max - mean of sampled scores; the mean value for the others.

    N log N in the number of tokens if u and U are c ln N; not causal. Equal measures choose the first query.

    Args:
        q: (B, H, N, d).
        k: (B, H_kv, N, d), H a multiple of H_kv.
        v: (B, H_kv, N, D).
        sampled: the keys of a query's sample; a sequence uses the first `chosen` of them.
        chosen: int64 (B,), u and U of each sequence.
        limit: at least the largest of them.
        counts: (B,) real tokens of each sequence, which come first; None: all are real.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of v.

    Raises:
        ValueError: invalid shapes or dtypes; the message names the argument.
    """
    check_heads(q, k, v)
    if counts is None:
        counts = torch.full((q.shape[0],), q.shape[2], device=q.device)
    group, out_dtype, dtype = q.shape[1] // k.shape[1], v.dtype, accum_dtype(q.dtype)
    q = q.to(dtype) * q.shape[-1] ** -0.5
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    return choose(IMPLEMENTATIONS, backend)(q, k, v, sampled, chosen, limit, counts).to(out_dtype)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, sampled: Sampled, chosen: Tensor, limit: int, counts: Tensor
) -> Tensor:
    """Memory u N and a slice of the sampled scores, which have no gradient; all have H heads, q is scaled."""
    order = sparsity(q, k, sampled, chosen, limit, counts).argsort(dim=-1, descending=True, stable=True)
    top = order[..., :limit, None]
    attends = (torch.arange(limit, device=q.device) < chosen[:, None])[:, None, :, None]
    real = torch.arange(q.shape[2], device=q.device) < counts[:, None]
    scores = q.gather(2, top.expand(-1, -1, -1, q.shape[3])) @ k.transpose(-1, -2)
    scores = scores.masked_fill(~real[:, None, None], torch.finfo(q.dtype).min)
    values = v.masked_fill(~real[:, None, :, None], 0.0)
    mean = values.sum(2, keepdim=True) / counts.clamp(min=1)[:, None, None, None]
    exact = torch.where(attends, scores.softmax(-1) @ values, mean)
    return mean.expand(-1, -1, q.shape[2], -1).scatter(2, top.expand_as(exact), exact)


@torch.no_grad()
def sparsity(q: Tensor, k: Tensor, sampled: Sampled, chosen: Tensor, limit: int, counts: Tensor) -> Tensor:
    """M (B, H, N): max - mean of the scores of a query with its sampled keys; the least number at padding."""
    lowest, width = torch.finfo(q.dtype).min, q.shape[3]
    in_sample = torch.arange(limit, device=q.device) < chosen[:, None, None, None]
    measures = []
    for first in range(0, q.shape[2], size := max(1, PAIRS // limit)):
        queries = q[:, :, first : first + size]
        places = torch.arange(first, first + queries.shape[2], device=q.device)
        keys = sampled(places).expand(len(q), -1, -1, -1)
        of_sample = k.gather(2, keys.flatten(2)[..., None].expand(-1, -1, -1, width))
        scores = (of_sample.unflatten(2, keys.shape[2:]) @ queries[..., None])[..., 0]
        mean = scores.masked_fill(~in_sample, 0.0).sum(-1) / chosen[:, None, None]
        measure = scores.masked_fill(~in_sample, lowest).amax(-1) - mean
        measures.append(measure.masked_fill(places >= counts[:, None, None], lowest))
    return torch.cat(measures, -1)


def reference(
    q: Tensor, k: Tensor, v: Tensor, sampled: Sampled, chosen: Tensor, limit: int, counts: Tensor
) -> Tensor:
    """From the definition, with an N x N matrix of weights per sequence and head."""
    keys = sampled(torch.arange(q.shape[2], device=q.device)).expand(len(q), -1, -1, -1)
    out = torch.zeros_like(v)
    for sequence, (count, number) in enumerate(zip(counts.tolist(), chosen.tolist())):
        for head in range(q.shape[1] if count else 0):
            scores = q[sequence, head, :count] @ k[sequence, head, :count].T
            weights = torch.full_like(scores, 1 / count)
            measure = []
            for query in range(count):
                of_sample = [scores[query, key].item() for key in keys[sequence, head, query].tolist()]
                measure.append(max(of_sample[:number]) - sum(of_sample[:number]) / number)
            for query in sorted(range(count), key=lambda at: -measure[at])[:number]:
                weights = weights.index_put((torch.tensor(query),), scores[query].softmax(-1))
            out[sequence, head, :count] = weights @ v[sequence, head, :count]
    return out


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
