"""Windows at once, chunks for some queries at a time, so that memory stays bounded."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import chunk_queries, join_queries
from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.sums import Sums, add, normalized, with_ones
from megakernel.ops.window import softmax_pairs

GROUP = 1024
"""Queries whose weights of chunks exist at once."""


class Windows(NamedTuple):
    """M windows of w queries and of W keys each."""

    keys: Tensor
    """(B, H, M, W, d)"""

    values: Tensor
    """(B, H, M, W, D)"""

    real: Tensor
    """(B or 1, M, W) bool: which keys exist."""

    queries: int
    """w"""


class Chunks(NamedTuple):
    """C summaries."""

    keys: Tensor
    """(B, H, C, d): k_c."""

    values: Tensor
    """(B, H, C, D): beta_c."""

    seen: Tensor
    """(B or 1, M, C) bool: the queries of a window see this chunk."""


def by_query(x: Tensor, window: int, count: int) -> Tensor:
    """(B, M, ...) -> (B, N, ...): the row of each query's window."""
    return x[:, torch.arange(count, device=x.device) // window]


def attend(q: Tensor, windows: Windows, chunks: Chunks) -> Tensor:
    """Attention (B, H, N, D)."""
    heads, length, dtype = q.shape[1], q.shape[2], accum_dtype(q.dtype)
    count = windows.keys.shape[2]
    queries = chunk_queries(q.to(dtype), heads, windows.queries, count)
    visible = windows.real[:, :, None].expand(-1, -1, windows.queries, -1)
    near = softmax_pairs(queries, windows.keys.to(dtype), with_ones(windows.values.to(dtype)), visible)
    values = join_queries(near.values, heads, length)
    logs = join_queries(near.scale_or_zero[..., None], heads, length)
    seen = by_query(chunks.seen, windows.queries, length)[:, None]

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, values, logs, seen = sequences
        chunk_keys, chunk_values = (x[:, :, None] for x in shared)
        far = softmax_pairs(q[:, :, None], chunk_keys, chunk_values, seen)
        total = add(Sums(values, logs[..., 0]), Sums(far.values[:, :, 0], far.scale_or_zero[:, :, 0]))
        return (normalized(total).to(values.dtype),), ()

    shared = (chunks.keys.to(dtype), with_ones(chunks.values.to(dtype)))
    (out,), _ = scan_groups(on_group, (), (q.to(dtype), values, logs, seen), shared, group=GROUP)
    return out.to(q.dtype)
