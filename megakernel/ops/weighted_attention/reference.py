"""Weighted attention from its formula: every pair and every difference of a query and a key at once."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.softmax_attention.spans import Spans
from megakernel.ops.weighted_attention.form import WeightForm


def component_weights(q: Tensor, k: Tensor, *, form: WeightForm, key_weights: Tensor, spans: Spans) -> Tensor:
    """log of the weight of every key, (B, H, N, S, M), -inf where a query sees none; arguments of `attend`."""
    keys = k.to(accum_dtype(k.dtype)).repeat_interleave(q.shape[1] // k.shape[1], 1).movedim(2, 3)[:, :, None]
    queries = q.to(keys.dtype)[:, :, :, None, None]
    root = q.shape[-1] ** 0.5
    if form.similarity == "softmax":
        logs = (queries * keys).sum(-1) / root
    else:
        logs = -(queries - keys).square().sum(-1) / (2 * root * keys.new_tensor(form.variances))
    key_weights = key_weights.repeat_interleave(q.shape[1] // k.shape[1], 1).movedim(2, 3)[:, :, None]
    visible = spans.mask(slice(None), 0, k.shape[3])[:, None, ..., None]
    # log 0 would have no gradient: a key of weight 0 is one that nobody sees.
    weighed = logs + torch.where(key_weights > 0, key_weights, 1.0).log()
    return weighed.masked_fill(~(visible & (key_weights > 0)), -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, *, form: WeightForm, key_weights: Tensor, spans: Spans) -> Tensor:
    """Arguments and result of `streamed.attend`."""
    logs = component_weights(q, k, form=form, key_weights=key_weights, spans=spans)
    values = v.to(logs.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    # Dividing all weights of a query by one number changes no quotient.
    largest = logs.detach().amax((-1, -2), keepdim=True).clamp(min=-1e30) if form.normalize else 0.0
    components = torch.exp(logs - largest)
    weights = components.sum(-1) if form.join == "sum" else components.amax(-1)
    if form.normalize:
        sums = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(sums == 0, 1.0, sums)
    return (weights @ values).to(v.dtype)


def responsibilities(q: Tensor, k: Tensor, *, form: WeightForm, key_weights: Tensor, spans: Spans) -> Tensor:
    """Arguments and result of `streamed.responsibilities`."""
    logs = component_weights(q, k, form=form, key_weights=key_weights, spans=spans)
    shares = logs.softmax(-1).nan_to_num(0.0)
    return shares.sum(2).movedim(-1, 2).unflatten(1, (k.shape[1], -1)).sum(2)
