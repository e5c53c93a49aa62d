"""Chunks of tokens whose state decays by one factor a token: what of a state and of a token is left where.

Shared by rules that add to such a state (`simple_gla`) and that correct it (`gated_delta_rule`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import chunk_keys, chunk_queries, unchunk_queries
from megakernel.ops.documents import Positions
from megakernel.ops.groups import Tensors, scan_groups
from megakernel.ops.scan import Links, chunk_links

CHUNK = 64
"""Tokens whose pairs are weighed one by one."""

GROUP = 2048
"""Tokens whose weights and chunk states exist at once, a multiple of CHUNK."""

GroupStep = Callable[..., tuple[Tensor, Tensor]]
"""(tensors of the group's tokens, their positions, the state that enters) -> (output, the state that leaves)."""


def scan_tokens(
    step: GroupStep, tokens: Tensors, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`step` over groups of tokens (dimension 2), each with the state that the one before it left."""
    varying = None if isinstance(positions, int) else positions[:, None]

    def on_group(start: int, carry: Tensors, sequences: Tensors, shared: Tensors):
        *here, at = sequences
        places = positions + start if at is None else at[:, 0]
        out, leaving = step(*here, places, carry[0])
        return (out,), (leaving,)

    (out,), (leaving,) = scan_groups(on_group, (state,), (*tokens, varying), (), group=GROUP)
    return out, leaving


class Chunks(NamedTuple):
    """C chunks of L tokens of a group, and how much of what stands where is left elsewhere. float32 or better."""

    queries: Tensor
    """(B, H_kv, C, G L, d), scaled."""

    keys: Tensor
    """(B, H_kv, C, L, d)"""

    values: Tensor
    """(B, H_kv, C, L, D)"""

    pairs: Tensor
    """(B, H_kv, C, L, L): of the token of a column at that of a row; 0 behind it and in another document."""

    kept: Tensor
    """(B, H_kv, C, L): of the state that enters the chunk at the token."""

    left: Tensor
    """(B, H_kv, C, L): of the token behind the chunk."""

    whole: Tensor
    """(B, H_kv, C) log of what a chunk leaves of a state, documents aside."""

    links: Links
    """Where documents begin."""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, dtype: torch.dtype
    ) -> "Chunks":
        """q (B, H, T, d), k (B, H_kv, T, d), v (B, H_kv, T, D), log_decay (B, H_kv, T, 1)."""
        links = chunk_links(positions, q.shape[2], q.device, CHUNK)
        chunks, size = links.writes.shape[1:]
        queries = chunk_queries(scaled(q, dtype), k.shape[1], size, chunks)
        keys, values, logs = (chunk_keys(x.to(dtype), size, chunks) for x in (k, v, log_decay))
        logs = logs[..., 0].cumsum(-1)
        between = logs[..., :, None] - logs[..., None, :]
        return cls(
            queries,
            keys,
            values,
            pairs=between.masked_fill(~links.visible[:, None, :, 0], -torch.inf).exp(),
            kept=logs.exp().masked_fill(~links.reads[:, None, :, 0], 0.0),
            left=(logs[..., -1:] - logs).masked_fill(~links.writes[:, None], -torch.inf).exp(),
            whole=logs[..., -1],
            links=links,
        )

    def weighed(self, written: Tensor, states: Tensor, heads: int, length: int) -> Tensor:
        """(B, H, T, D) of what the chunk's tokens write, (B, H_kv, C, L, D), and of states that enter each chunk."""
        size = self.keys.shape[3]
        scores = (self.queries @ self.keys.transpose(-1, -2)).unflatten(3, (-1, size))
        scores = scores * self.pairs[:, :, :, None]
        seen = (self.queries @ states).unflatten(3, (-1, size)) * self.kept[:, :, :, None, :, None]
        return unchunk_queries(scores.flatten(3, 4) @ written + seen.flatten(3, 4), heads, length)


def scaled(q: Tensor, dtype: torch.dtype) -> Tensor:
    """q / sqrt(d)."""
    return q.to(dtype) * q.shape[-1] ** -0.5
