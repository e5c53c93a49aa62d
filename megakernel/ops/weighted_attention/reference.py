"""Weighted attention from its formula, with all differences of queries and keys in memory at once."""

import torch
from torch import Tensor

from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.tensors import accum_dtype
from megakernel.ops.weighted_attention.weights import WeightOptions


def component_weights(
    q: Tensor, k: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> Tensor:
    """log weight of every key (B, H, N, S, M), -inf if invisible; arguments as in `attend`."""
    keys = k.to(accum_dtype(k.dtype)).repeat_interleave(q.shape[1] // k.shape[1], 1).movedim(2, 3)[:, :, None]
    queries = q.to(keys.dtype)[:, :, :, None, None]
    root = q.shape[-1] ** 0.5
    if options.similarity == "softmax":
        logs = (queries * keys).sum(-1) / root
    else:
        logs = -(queries - keys).square().sum(-1) / (2 * root * keys.new_tensor(options.variances))
    key_weights = key_weights.repeat_interleave(q.shape[1] // k.shape[1], 1).movedim(2, 3)[:, :, None]
    visible = spans.mask(slice(None), 0, k.shape[3])[:, None, ..., None]
    # log 0 has no useful gradient, so keys of weight 0 are made invisible instead.
    weighed = logs + torch.where(key_weights > 0, key_weights, 1.0).log()
    return weighed.masked_fill(~(visible & (key_weights > 0)), -torch.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> Tensor:
    """Arguments and result of `streamed.attend`."""
    logs = component_weights(q, k, options=options, key_weights=key_weights, spans=spans)
    values = v.to(logs.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    # The maximum cancels in the quotient.
    largest = logs.detach().amax((-1, -2), keepdim=True).clamp(min=-1e30) if options.normalize else 0.0
    components = torch.exp(logs - largest)
    weights = components.sum(-1) if options.join == "sum" else components.amax(-1)
    if options.normalize:
        sums = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(sums == 0, 1.0, sums)
    return (weights @ values).to(v.dtype)


def responsibilities(
    q: Tensor, k: Tensor, *, options: WeightOptions, key_weights: Tensor, spans: Spans
) -> Tensor:
    """Arguments and result of `streamed.responsibilities`."""
    logs = component_weights(q, k, options=options, key_weights=key_weights, spans=spans)
    shares = logs.softmax(-1).nan_to_num(0.0)
    return shares.sum(2).movedim(-1, 2).unflatten(1, (k.shape[1], -1)).sum(2)
