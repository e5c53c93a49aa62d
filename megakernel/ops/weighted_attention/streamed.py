"""Weighted attention in tiles of queries and keys, so that few weights are in memory at once.

Forward saves one log-sum-exp per query, and backward recomputes the weights of each tile. Given the log-sum-exp and the
inner product of output and output gradient, the gradient is a sum over tiles, and autograd differentiates one tile's
weights for any similarity or mixture.
"""

import torch
from torch import Tensor

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
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.weighted_attention.weights import WeightOptions, component_logs, position_logs

QUERIES = 256
"""Queries of one tile."""

KEYS = 512
"""Positions of one tile."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> Tensor:
    """(B, H, N, D). k (B, H_kv, M, S, d), key_weights (B, H_kv, M, S); spans: the positions that each query sees."""
    group = q.shape[1] // k.shape[1]
    # Query heads are grouped by key head: (B, H_kv, G, N, d).
    out = _TiledAttention.apply(q.unflatten(1, (-1, group)), k, v, key_weights, options, spans)
    return out.flatten(1, 2)


def responsibilities(
    q: Tensor, k: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> Tensor:
    """Each key's share of its position's weight, summed over the queries that see it: (B, H_kv, M, S).

    Arguments as in `attend`. Excluded queries have empty spans.
    """
    rows = q.unflatten(1, (k.shape[1], -1))
    sums, dtype = torch.zeros_like(key_weights), accum_dtype(q.dtype)
    for queries, keys in spans.blocks(QUERIES, KEYS):
        weights = key_weights[..., keys]
        tile_q = rows[:, :, :, queries].to(dtype).flatten(2, 3)
        logs = component_logs(options, tile_q, k[..., keys, :].to(dtype), weights)
        shares = logs.softmax(-2).unflatten(2, (rows.shape[2], -1))
        visible = spans.mask(queries, keys.start, keys.stop)[:, None, None, :, None]
        tile_sums = shares.masked_fill(~visible, 0.0).sum((2, 3))
        sums[..., keys] += torch.where((weights > 0).any(2, keepdim=True), tile_sums, 0.0)
    return sums


def _tile(
    q: Tensor, k: Tensor, v: Tensor, key_weights: Tensor, queries: slice, keys: slice
) -> tuple[Tensor, ...]:
    """Views of these queries, and of the keys, values and key weights of these positions."""
    return q[:, :, :, queries], k[..., keys, :], v[:, :, keys], key_weights[..., keys]


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, key_weights, options, spans):
        finish = normalized if options.normalize else unnormalized
        total, scale = empty_partial_output(q, v.shape[-1])
        assert scale is not None
        for queries, keys in spans.blocks(QUERIES, KEYS):
            tile = _tile(q, k, v, key_weights, queries, keys)
            tile_q, tile_k, values, weights = (x.to(total.dtype) for x in tile)
            visible = spans.mask(queries, keys.start, keys.stop)
            logs = position_logs(options, tile_q.flatten(2, 3), tile_k, weights, visible)
            largest = logs.amax(-1).clamp(min=EMPTY)
            sums = torch.exp(logs - largest[..., None]) @ with_ones(values)[:, :, None]
            before = PartialOutput(total[:, :, :, queries], scale[:, :, :, queries])
            after = add(before, PartialOutput(sums, largest))
            total[:, :, :, queries], scale[:, :, :, queries] = after.values, after.scale_or_zero
        out = finish(PartialOutput(total, scale))
        # Log of the divisor of each query's weights: their sum, or 1 without normalization.
        divisor = (
            log_normalizer(PartialOutput(total, scale)) if options.normalize else torch.zeros_like(scale)
        )
        ctx.options, ctx.spans = options, spans
        ctx.save_for_backward(q, k, v, key_weights, out, divisor)
        return out.to(v.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        q, k, v, key_weights, out, divisor = ctx.saved_tensors
        grad = grad.to(out.dtype)
        # The gradient of the normalizer, which is the column of ones in the sums.
        dones = (
            -(grad * out).sum(-1, keepdim=True) if ctx.options.normalize else torch.zeros_like(out[..., :1])
        )
        dsums = torch.cat([grad, dones], -1)
        dq, dk, dv, dkey_weights = (torch.zeros_like(x, dtype=out.dtype) for x in (q, k, v, key_weights))
        for queries, keys in ctx.spans.blocks(QUERIES, KEYS):
            tile = _tile(q, k, v, key_weights, queries, keys)
            leaves = [x.detach().to(out.dtype).requires_grad_() for x in tile]
            tile_q, tile_k, values, weights = leaves
            visible = ctx.spans.mask(queries, keys.start, keys.stop)
            with torch.enable_grad():
                logs = position_logs(ctx.options, tile_q.flatten(2, 3), tile_k, weights, visible)
                shares = torch.exp(logs - divisor[:, :, :, queries, None])
                product = (shares @ with_ones(values)[:, :, None] * dsums[:, :, :, queries]).sum()
            totals = _tile(dq, dk, dv, dkey_weights, queries, keys)
            for total, gradient in zip(totals, torch.autograd.grad(product, leaves)):
                total += gradient
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dkey_weights.to(key_weights.dtype), None, None
