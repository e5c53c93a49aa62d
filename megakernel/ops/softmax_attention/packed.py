"""Causal attention within packed documents by the variable-length flash kernel, without a mask.

From a few thousand tokens on, an N x N mask per layer would take more memory than the layer's activations.
"""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.dispatch import runs_on_gpu
from megakernel.ops.documents import cached_for_positions, cu_seqlens_from_positions, is_graph

aten = torch.ops.aten

WIDEST = 256
"""The largest d of the kernel."""


def supports(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel supports q (B, H, N, d), k (B, H_kv, N, d) and v (B, H_kv, N, D)."""
    width = q.shape[-1]
    if v.shape[-1] != width or width % 8 or width > WIDEST:
        return False
    return runs_on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Causal attention outputs (B, H, N, d) within documents.

    positions: (B or 1, N) within documents, of sequences without a cache; the output of padding, at -1, is 0.
    window: tokens that a token sees, including itself; None: all of its document up to itself.
    """
    batch, _, length, _ = q.shape
    starts, has_padding = cached_for_positions(
        positions,
        (attend, batch),
        lambda at: (cu_seqlens_from_positions(at.expand(batch, -1)), _has_padding(at)),
    )
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    edges: dict[str, Any] = {}
    if window is not None:
        edges = {"window_size_left": window - 1, "window_size_right": 0}
    # The sequence length bounds the longest document, whose length would have to be read from the GPU.
    sizes = (starts, starts, length, length)
    out, *_ = aten._flash_attention_forward(*tokens, *sizes, 0.0, window is None, False, **edges)
    out = out.unflatten(0, (batch, length)).transpose(1, 2)
    return out.masked_fill((positions < 0)[:, None, :, None], 0.0) if has_padding else out


def _has_padding(positions: Tensor) -> bool:
    """Whether there may be padding. Looks once for all layers, so that without any they need no pass over outputs."""
    return is_graph(positions) or bool((positions < 0).any())
