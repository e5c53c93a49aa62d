"""EVA's control variates, and bidirectional attention over windows and chunk summaries."""

from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import chunk_queries
from megakernel.ops.dispatch import choose
from megakernel.ops.documents import Positions
from megakernel.ops.groups import scan_groups
from megakernel.ops.partial_output import PartialOutput, add, normalized, with_ones
from megakernel.ops.tensors import Tensors, accum_dtype
from megakernel.ops.window import softmax_pairs, unchunk_partial

GROUP = 1024
"""Queries whose weights on chunk summaries are in memory at once."""


class Windows(NamedTuple):
    """M windows of w queries and of W keys each."""

    keys: Tensor
    """(B, H, M, W, d)"""

    values: Tensor
    """(B, H, M, W, D)"""

    real: Tensor
    """(B or 1, M, W) bool: whether the key exists."""

    queries: int
    """w, queries per window."""


class ChunkSummaries(NamedTuple):
    """Summaries of C chunks."""

    keys: Tensor
    """(B, H, C, d): k_c."""

    values: Tensor
    """(B, H, C, D): beta_c."""

    visible: Tensor
    """(B or 1, M, C) bool: whether the queries of the window see this chunk."""


def control_variates(omega: Tensor, keys: Tensor, values: Tensor, real: Tensor | None = None) -> Tensor:
    """beta_c = sum_j softmax_j(omega_c.k_j / sqrt(d) - |k_j|^2 / (2 sqrt(d))) v_j over the keys of each chunk.

    omega: (B, H, S, d); keys: (B, H, S, s, d); values: (B, H, S, s, D); real: (B or 1, S, s) bool, whether keys exist.
    Returns (B, H, S, D), 0 for a chunk without keys.
    """
    scores = (keys @ omega[..., None])[..., 0] - keys.square().sum(-1) / 2
    scores = scores * keys.shape[-1] ** -0.5
    if real is None:
        return (scores.softmax(-1)[..., None, :] @ values)[..., 0, :]
    weights = scores.masked_fill(~real[:, None], torch.finfo(scores.dtype).min).softmax(-1)
    return (weights.masked_fill(~real[:, None], 0.0)[..., None, :] @ values)[..., 0, :]


def eva_attention(
    q: Tensor, windows: Windows, chunks: ChunkSummaries, *, backend: str | None = None
) -> Tensor:
    """One softmax over a query's window, with weights exp(q.k / sqrt(d)), and over chunks, exp(q.k_c / sqrt(d)).

    Args:
        q: (B, H, N, d); window m holds queries m w .. (m + 1) w - 1.
        windows: M = ceil(N / w) windows of keys and values.
        chunks: summaries of all chunks of the sequence.
        backend: reference or chunked.

    Returns:
        (B, H, N, D) in the dtype of q; 0 for queries that see nothing.
    """
    return choose(IMPLEMENTATIONS, backend)(q, windows, chunks)


def _by_query(x: Tensor, window: int, count: int) -> Tensor:
    """(B, M, ...) per window -> (B, N, ...) per query."""
    return x[:, torch.arange(count, device=x.device) // window]


def chunked(q: Tensor, windows: Windows, chunks: ChunkSummaries) -> Tensor:
    """All windows at once, and chunk summaries for GROUP queries at a time to bound memory."""
    heads, length, dtype = q.shape[1], q.shape[2], accum_dtype(q.dtype)
    count = windows.keys.shape[2]
    queries = chunk_queries(q.to(dtype), heads, windows.queries, count)
    visible = windows.real[:, :, None].expand(-1, -1, windows.queries, -1)
    near = softmax_pairs(queries, windows.keys.to(dtype), with_ones(windows.values.to(dtype)), visible)
    visible = _by_query(chunks.visible, windows.queries, length)[:, None]

    def on_group(positions: Positions, carry: Tensors, sequences: Tensors, shared: Tensors):
        q, *near, visible = sequences
        chunk_keys, chunk_values = (x[:, :, None] for x in shared)
        far = softmax_pairs(q[:, :, None], chunk_keys, chunk_values, visible)
        total = add(PartialOutput(*near), PartialOutput(far.values[:, :, 0], far.scale_or_zero[:, :, 0]))
        return (normalized(total),), ()

    sequences = (q.to(dtype), *unchunk_partial(near, heads, length), visible)
    shared = (chunks.keys.to(dtype), with_ones(chunks.values.to(dtype)))
    (out,), _ = scan_groups(on_group, (), sequences, shared, group=GROUP)
    return out.to(q.dtype)


def reference(q: Tensor, windows: Windows, chunks: ChunkSummaries) -> Tensor:
    """From the formula, with one matrix over all window keys and all chunks."""
    dtype, length = accum_dtype(q.dtype), q.shape[2]
    count = windows.keys.shape[2]
    keys = torch.cat([windows.keys.flatten(2, 3), chunks.keys], 2).to(dtype)
    values = torch.cat([windows.values.flatten(2, 3), chunks.values], 2).to(dtype)
    own = torch.eye(count, dtype=torch.bool, device=q.device)[None, :, :, None] & windows.real[:, None]
    batch = max(len(own), len(chunks.visible))
    visible = torch.cat([own.flatten(2).expand(batch, -1, -1), chunks.visible.expand(batch, -1, -1)], 2)
    visible = _by_query(visible, windows.queries, length)[:, None]
    scores = q.to(dtype) @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = torch.where(visible, scores, -torch.inf).softmax(-1)
    return (torch.where(visible, weights, 0.0) @ values).to(q.dtype)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
