"""Softmax attention from its formula, in one matrix."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.softmax_attention.spans import Spans


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: Spans | None,
    causal: bool,
    key_mask: Tensor | None,
    mass: Tensor | None = None,
) -> Tensor:
    """Arguments and result of `blocked.attend`."""
    group = q.shape[1] // k.shape[1]
    queries, keys = q.shape[2], k.shape[2]
    k, v = (
        k.to(accum_dtype(k.dtype)).repeat_interleave(group, 1),
        v.to(accum_dtype(v.dtype)).repeat_interleave(group, 1),
    )
    visible = torch.ones(1, queries, keys, dtype=torch.bool, device=q.device)
    if spans is not None:
        visible = spans.mask(slice(None), 0, keys)
    elif causal:
        visible = visible.tril()
    if mass is not None:
        visible = visible & (mass > 0)[:, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None]
    scores = q.to(k.dtype) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mass is not None:
        scores = scores + mass.to(k.dtype).clamp(min=torch.finfo(k.dtype).tiny).log()[:, None, None]
    weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    # A row that sees nothing is 0 / 0 in the formula and 0 here.
    return (weights.masked_fill(~visible[:, None], 0.0) @ v).to(q.dtype)
