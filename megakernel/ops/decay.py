"""Chunked computation with a state that decays by one factor per token: cumulative decays within chunks.

Shared by `simple_gla`, which adds to the state, and `gated_delta_rule`, which corrects it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.chunks import chunk_keys, chunk_queries, unchunk_queries
from megakernel.ops.documents import Positions
from megakernel.ops.groups import scan_groups
from megakernel.ops.scan import Links, chunk_links
from megakernel.ops.tensors import Tensors

CHUNK = 64
"""Tokens of a chunk, whose attention matrix is computed explicitly."""

GROUP = 2048
"""Tokens whose weights and chunk states exist at once, a multiple of CHUNK."""

GroupStep = Callable[..., tuple[Tensor, Tensor]]
"""(tensors of the group's tokens, their positions, incoming state) -> (output, outgoing state)."""


def scan_tokens(
    step: GroupStep, tokens: Tensors, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `step` over groups of tokens (dimension 2), passing the state from each group to the next."""

    def on_group(positions: Positions, carry: Tensors, tokens: Tensors, shared: Tensors):
        out, outgoing = step(*tokens, positions, carry[0])
        return (out,), (outgoing,)

    (out,), (outgoing,) = scan_groups(on_group, (state,), tokens, (), group=GROUP, positions=positions)
    return out, outgoing


class Chunks(NamedTuple):
    """C chunks of L tokens of a group, and their decays, in float32 or better."""

    queries: Tensor
    """(B, H_kv, C, G L, d), scaled."""

    keys: Tensor
    """(B, H_kv, C, L, d)"""

    values: Tensor
    """(B, H_kv, C, L, D)"""

    pairs: Tensor
    """(B, H_kv, C, L, L): decay from the column's token to the row's; 0 if it is later or in another document."""

    kept: Tensor
    """(B, H_kv, C, L): decay of the chunk's incoming state up to the token."""

    left: Tensor
    """(B, H_kv, C, L): decay from the token to the end of the chunk."""

    whole: Tensor
    """(B, H_kv, C): log decay over the chunk, ignoring document starts."""

    links: Links
    """Document boundaries."""

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, positions: Positions, dtype: torch.dtype
    ) -> "Chunks":
        """Chunks of q (B, H, T, d), k (B, H_kv, T, d), v (B, H_kv, T, D) and log_decay (B, H_kv, T, 1)."""
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

    def token_outputs(self, written: Tensor, states: Tensor, heads: int, length: int) -> Tensor:
        """Outputs (B, H, T, D) from what tokens write, (B, H_kv, C, L, D), and the incoming states of the chunks."""
        size = self.keys.shape[3]
        scores = (self.queries @ self.keys.transpose(-1, -2)).unflatten(3, (-1, size))
        scores = scores * self.pairs[:, :, :, None]
        from_state = (self.queries @ states).unflatten(3, (-1, size)) * self.kept[:, :, :, None, :, None]
        return unchunk_queries(scores.flatten(3, 4) @ written + from_state.flatten(3, 4), heads, length)


def scaled(q: Tensor, dtype: torch.dtype) -> Tensor:
    """q / sqrt(d)."""
    return q.to(dtype) * q.shape[-1] ** -0.5
