"""Softmax attention through PyTorch's fused kernels; packed rows by blocks of queries, without an N x N mask."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.softmax_attention.spans import Spans

BLOCK = 512
"""Queries whose mask exists at once."""


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
    """(B, H, N, D). spans: what each query may see; None: all keys, or with `causal` those up to its own."""
    grouped = q.shape[1] != k.shape[1]
    if spans is None:
        mask = None if key_mask is None else key_mask[:, None, None]
        if mass is not None:
            # A finite logarithm of 0: rows without any key stay finite.
            logs = mass.to(accum_dtype(q.dtype)).log().clamp(min=torch.finfo(q.dtype).min / 2)
            mask = logs.to(q.dtype)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    outputs = []
    starts = range(0, q.shape[2], BLOCK)
    for start, low, high in zip(starts, *spans.bounds(BLOCK)):
        queries = q[:, :, start : start + BLOCK]
        mask = spans.mask(slice(start, start + BLOCK), low, high)
        if key_mask is not None:
            mask = mask & key_mask[:, None, low:high]
        outputs.append(
            F.scaled_dot_product_attention(
                queries, k[:, :, low:high], v[:, :, low:high], attn_mask=mask[:, None], enable_gqa=grouped
            )
        )
    return torch.cat(outputs, 2)
