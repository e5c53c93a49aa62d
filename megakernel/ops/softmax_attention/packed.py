"""Causal attention within packed documents by the flash kernel for sequences of many lengths: no mask is made or kept.

A mask of N^2 numbers for every layer is more memory than a layer's activations from a few thousand tokens on.
"""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.dispatch import runs_on_gpu
from megakernel.ops.documents import cu_seqlens_from_positions, made_once

aten = torch.ops.aten

WIDEST = 256
"""d of the kernel, at most."""


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether there is a kernel for q (B, H, N, d), k (B, H_kv, N, d) and v (B, H_kv, N, D)."""
    width = q.shape[-1]
    if v.shape[-1] != width or width % 8 or width > WIDEST:
        return False
    return runs_on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16)


def attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Weighted means of the values (B, H, N, d) of the tokens up to each one in its document.

    positions: (B or 1, N) within documents, of sequences that begin with their first token; padding, at -1, gets 0.
    window: tokens of a document that a token sees, itself among them; None: all.
    """
    batch, _, length, _ = q.shape
    starts = made_once(positions, (attend, batch), lambda at: cu_seqlens_from_positions(at.expand(batch, -1)))
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    edges: dict[str, Any] = {}
    if window is not None:
        edges = {"window_size_left": window - 1, "window_size_right": 0}
    # No document is longer than its sequence: the host need not know by how much.
    sizes = (starts, starts, length, length)
    out, *_ = aten._flash_attention_forward(*tokens, *sizes, 0.0, window is None, False, **edges)
    out = out.unflatten(0, (batch, length)).transpose(1, 2)
    return out.masked_fill((positions < 0)[:, None, :, None], 0.0)
