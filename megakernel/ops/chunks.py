"""Reshapes tokens into C chunks of L tokens, with the G query heads of a key head folded into rows."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def chunk_keys(x: Tensor, size: int, chunks: int) -> Tensor:
    """(B, H_kv, T, d) -> (B, H_kv, C, L, d), padded with zeros."""
    missing = chunks * size - x.shape[2]
    # F.pad copies even if there is nothing to pad.
    return (F.pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (chunks, size))


def chunk_queries(x: Tensor, kv_heads: int, size: int, chunks: int = 1) -> Tensor:
    """(B, H, T, d) -> (B, H_kv, C, G L, d) for G query heads per key head."""
    return chunk_keys(x, size, chunks).unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3, 4)


def token_queries(x: Tensor, kv_heads: int) -> Tensor:
    """`chunk_queries` of one token: (B, H, 1, d) -> (B, H_kv, 1, G, d)."""
    return x.reshape(len(x), kv_heads, 1, -1, x.shape[-1])


def unchunk_token(x: Tensor) -> Tensor:
    """The inverse of `token_queries`: (B, H_kv, 1, G, ...) -> (B, H, 1, ...)."""
    return x.flatten(1, 3).unsqueeze(2)


def unchunk_queries(x: Tensor, heads: int, length: int) -> Tensor:
    """The inverse of `chunk_queries`: (B, H_kv, C, G L, ...) -> (B, H, T, ...)."""
    group = heads // x.shape[1]
    whole = x.unflatten(3, (group, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return whole.narrow(2, 0, length)


def as_queries(chunked: Sequence[Tensor], q: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """`unchunk_queries` of the output, in `dtype`, and of further tensors, in the layout of q (B, H, T, d)."""
    out, *rest = (unchunk_queries(x, q.shape[1], q.shape[2]) for x in chunked)
    return out.to(dtype), *rest


def query_mask(x: Tensor, group: int) -> Tensor:
    """(B, C, L) -> (B, 1, C, G L, 1), repeated for all heads."""
    return x[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(3, 4)[..., None]
