"""The layout of a group of tokens: chunks of L tokens, query heads folded into the rows of their key head."""

import torch.nn.functional as F
from torch import Tensor


def padding(length: int, size: int) -> int:
    """Tokens missing to a multiple of `size`."""
    return -length % size


def chunk_keys(x: Tensor, size: int) -> Tensor:
    """(B, H_kv, T, d) -> (B, H_kv, C, L, d), zeros behind the last token."""
    return F.pad(x, (0, 0, 0, padding(x.shape[2], size))).unflatten(2, (-1, size))


def chunk_queries(x: Tensor, kv_heads: int, size: int) -> Tensor:
    """(B, H, T, d) -> (B, H_kv, C, G L, d) for G query heads per key head."""
    chunked = chunk_keys(x, size).unflatten(1, (kv_heads, -1))
    return chunked.transpose(2, 3).flatten(3, 4)


def join_queries(x: Tensor, heads: int, length: int) -> Tensor:
    """The inverse of `chunk_queries`: (B, H_kv, C, G L, ...) -> (B, H, T, ...)."""
    group = heads // x.shape[1]
    whole = x.unflatten(3, (group, -1)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return whole.narrow(2, 0, length)
