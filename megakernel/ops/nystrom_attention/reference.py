"""The same from its formula: one N x N matrix of weights for each row and head, means taken one by one."""

from collections.abc import Callable

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segments: Tensor,
    count: int,
    invert: Callable[[Tensor], Tensor],
    key_mask: Tensor | None,
) -> Tensor:
    """Arguments and result of `chunked.attend`."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    wide_q, wide_k, wide_v = (x.to(accum_dtype(x.dtype)) for x in (q, k, v))
    out = v.new_zeros(batch, heads, length, v.shape[-1])
    for row, there in enumerate(real):
        here = segments.expand(batch, -1)[row, there]
        for head in range(heads if len(here) else 0):
            queries, keys, values = (
                x[row, index, there]
                for x, index in ((wide_q, head), (wide_k, head // group), (wide_v, head // group))
            )
            out[row, head, there] = (_weights(queries, keys, here, count, invert) @ values).to(v.dtype)
    return out


def _weights(
    q: Tensor, k: Tensor, segments: Tensor, count: int, invert: Callable[[Tensor], Tensor]
) -> Tensor:
    """(n, n) of one row and head, for the n real tokens q, k (n, d)."""
    used = segments.unique().tolist()
    mean_q, mean_k = (torch.stack([x[segments == s].mean(0) for s in used]) for x in (q, k))
    # Landmarks that do not exist are their own inverse.
    between = torch.eye(count, dtype=q.dtype, device=q.device)
    places = torch.meshgrid(*[torch.tensor(used, device=q.device)] * 2, indexing="ij")
    inverse = invert(between.index_put(places, _softmax(mean_q, mean_k)))[places]
    return _softmax(q, mean_k) @ inverse @ _softmax(mean_q, k)


def _softmax(q: Tensor, k: Tensor) -> Tensor:
    # exp of a score over exp of the largest: of large queries exp alone overflows.
    return torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1)
