"""Weighted attention in blocks of queries and keys: all pairs are weighed, and few weights exist at once.

Forward keeps one log-sum-exp per query. Backward weighs each block of pairs again: given the log-sum-exp and the
inner product of output and its gradient, a quotient of sums over all keys has the gradient of a plain sum, block by
block, and autograd differentiates the weights of one block whatever similarity or mixture made them.
"""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.partial_output import (
    PartialOutput,
    add,
    empty_partial_output,
    log_normalizer,
    normalized,
    unnormalized,
    with_ones,
)
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.state import EMPTY
from megakernel.ops.weighted_attention.form import WeightForm, component_logs, position_logs

QUERIES = 256
"""Queries of one block."""

KEYS = 512
"""Positions of keys of one block."""


def attend(q: Tensor, k: Tensor, v: Tensor, *, form: WeightForm, key_weights: Tensor, spans: Spans) -> Tensor:
    """(B, H, N, D). k (B, H_kv, M, S, d), key_weights (B, H_kv, M, S); spans: which positions each query sees."""
    group = q.shape[1] // k.shape[1]
    # Query heads of one key head become rows beside each other: (B, H_kv, G, N, d).
    out = _Stream.apply(q.unflatten(1, (-1, group)), k, v, key_weights, form, spans)
    return out.flatten(1, 2)


def responsibilities(q: Tensor, k: Tensor, *, form: WeightForm, key_weights: Tensor, spans: Spans) -> Tensor:
    """Share of each key in its position's weight, summed over the queries that see it: (B, H_kv, M, S).

    Arguments as in `attend`. A query that must not count has an empty span.
    """
    rows = q.unflatten(1, (k.shape[1], -1))
    sums, dtype = torch.zeros_like(key_weights), accum_dtype(q.dtype)
    for queries, keys in spans.blocks(QUERIES, KEYS):
        some = key_weights[..., keys]
        asking = rows[:, :, :, queries].to(dtype).flatten(2, 3)
        logs = component_logs(form, asking, k[..., keys, :].to(dtype), some)
        share = logs.softmax(-2).unflatten(2, (rows.shape[2], -1))
        visible = _visible(spans, queries, keys)[:, None, None, :, None]
        seen = share.masked_fill(~visible, 0.0).sum((2, 3))
        sums[..., keys] += torch.where((some > 0).any(2, keepdim=True), seen, 0.0)
    return sums


def _visible(spans: Spans, queries: slice, keys: slice) -> Tensor:
    return spans.mask(queries, keys.start, keys.stop)


def _part(
    q: Tensor, k: Tensor, v: Tensor, key_weights: Tensor, queries: slice, keys: slice
) -> tuple[Tensor, ...]:
    """Views of these queries, and of the keys, values and key weights of these positions."""
    return q[:, :, :, queries], k[..., keys, :], v[:, :, keys], key_weights[..., keys]


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, key_weights, form, spans):
        finish = normalized if form.normalize else unnormalized
        total, scale = empty_partial_output(q, v.shape[-1])
        assert scale is not None
        for queries, keys in spans.blocks(QUERIES, KEYS):
            rows, some, values, weights = (
                x.to(total.dtype) for x in _part(q, k, v, key_weights, queries, keys)
            )
            logs = position_logs(form, rows.flatten(2, 3), some, weights, _visible(spans, queries, keys))
            largest = logs.amax(-1).clamp(min=EMPTY)
            found = PartialOutput(
                torch.exp(logs - largest[..., None]) @ with_ones(values)[:, :, None], largest
            )
            before = PartialOutput(total[:, :, :, queries], scale[:, :, :, queries])
            both = add(before, found)
            total[:, :, :, queries], scale[:, :, :, queries] = both.values, both.scale_or_zero
        out = finish(PartialOutput(total, scale))
        # log of what a weight is divided by: its query's sum, or nothing.
        divisor = log_normalizer(PartialOutput(total, scale)) if form.normalize else torch.zeros_like(scale)
        ctx.form, ctx.spans = form, spans
        ctx.save_for_backward(q, k, v, key_weights, out, divisor)
        return out.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, key_weights, out, divisor = ctx.saved_tensors
        grad = grad.to(out.dtype)
        # The normalizer's own share in the gradient: it multiplies the column of ones.
        of_ones = (
            -(grad * out).sum(-1, keepdim=True) if ctx.form.normalize else torch.zeros_like(out[..., :1])
        )
        of_sums = torch.cat([grad, of_ones], -1)
        dq, dk, dv, dkey_weights = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v, key_weights))
        for queries, keys in ctx.spans.blocks(QUERIES, KEYS):
            part = _part(q, k, v, key_weights, queries, keys)
            leaves = [x.detach().to(out.dtype).requires_grad_() for x in part]
            rows, some, values, weights = leaves
            visible = _visible(ctx.spans, queries, keys)
            with torch.enable_grad():
                logs = position_logs(ctx.form, rows.flatten(2, 3), some, weights, visible)
                shares = torch.exp(logs - divisor[:, :, :, queries, None])
                block = (shares @ with_ones(values)[:, :, None] * of_sums[:, :, :, queries]).sum()
            for total, found in zip(
                _part(dq, dk, dv, dkey_weights, queries, keys), torch.autograd.grad(block, leaves)
            ):
                total += found
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dkey_weights.to(key_weights.dtype), None, None
