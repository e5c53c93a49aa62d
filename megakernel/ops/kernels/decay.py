"""Decaying states, for kernels whose only notion of decay is one log scale per key.

With c_i the sum of log decays from the start of the segment to token i, key j is scaled by exp(-c_j) and query i by
exp(c_i). Between segments the states themselves decay (`states.pass_states`).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.kernels.arguments import SequenceInfo


class Decay(NamedTuple):
    """Cumulative log decays of a state, float32, relative to the start of each segment."""

    of_keys: Any
    """(B, H_kv, keys): c where each key enters the state; the key is scaled by exp(-c)."""

    of_queries: Any
    """(B, H_kv, N): c where each query reads the state, plus the log of the scale of all weights."""

    of_segments: Any
    """(B, H_kv, segments): c at the end of each segment."""

    @staticmethod
    def of_tokens(log_decay: Tensor, segment: int, scale: float) -> "Decay":
        """One key per token. log_decay: (B, H_kv, N), applied before a token's key and query. scale: of all weights."""
        logs, of_segments = Decay._cumulative(log_decay, segment)
        return Decay(logs, logs + math.log(scale), of_segments)

    @staticmethod
    def of_blocks(log_decay: Tensor, segment: int, places: Tensor, rank: int) -> "Decay":
        """For landmarks. log_decay: (B, H_kv, N), applied after a token's query and before landmarks enter there.

        places: (B or 1, blocks) indices of the tokens where `rank` landmarks enter, negative for none.
        """
        logs, of_segments = Decay._cumulative(log_decay, segment)
        at = places.clamp(min=0).to(torch.int64)[:, None].expand(*log_decay.shape[:2], -1)
        of_keys = logs.gather(2, at).repeat_interleave(rank, 2)
        return Decay(of_keys, logs - log_decay, of_segments)

    @staticmethod
    def _cumulative(log_decay: Tensor, segment: int) -> tuple[Tensor, Tensor]:
        """Cumulative log decays after each token (B, H_kv, N) and each segment (B, H_kv, segments)."""
        length = log_decay.shape[2]
        logs = F.pad(log_decay, (0, -length % segment)).unflatten(2, (-1, segment))
        within = logs.cumsum(3)
        return within.flatten(2, 3)[..., :length].contiguous(), within[..., -1].contiguous()


def gradient_of_decay(
    of_keys: Tensor,
    of_queries: Tensor | None,
    of_entering: Tensor | None,
    of_first: Tensor | None,
    seq: SequenceInfo,
    segment: int,
    *,
    decay_after_read: bool,
) -> Tensor:
    """(B, H_kv, N): gradients of each token's log decay, from gradients of the cumulative log decays.

    The decay of token s scales the weights of keys that entered before s for queries that read after it, within the
    document. Its gradient is therefore the sum of `of_keys` over those keys minus the sum of `of_queries` over earlier
    queries. Sums restart in each segment, because over all tokens rounding errors would accumulate.

    Args:
        of_keys: (B, H_kv, N), gradient of each key's log scale.
        of_queries: (B, H_kv, N), gradient of the log scale of all weights of a query; None if normalized, when it is 0.
        of_entering: (B, H_kv, segments), gradient of the log scale of the state that enters each segment, from
            `Launcher.pass_states`; None treats all tokens as one segment.
        of_first: (B, H_kv), the same of the state that enters the sequence. It corrects `of_entering` of shards, which
            counts the first state as part of the last one, although a shard's last state is its own sums alone.
        segment: tokens per segment.
        decay_after_read: a query reads the state before its own token's decay.
    """
    if of_entering is None:
        segment, of_entering = seq.length, of_keys.new_zeros(*of_keys.shape[:2], 1)
    if of_first is not None:
        of_entering = of_entering - of_entering[..., :1] + of_first[..., None]
    places = torch.arange(of_keys.shape[2], device=of_keys.device)
    begins = places // segment * segment
    first = places.new_full((1, len(places)), seq.start) if seq.starts is None else seq.starts.to(torch.int64)
    origin = torch.maximum(first, begins)[:, None].expand_as(of_keys)

    def sum_before(x: Tensor, inclusive: bool) -> Tensor:
        """Sums over the tokens before each one in its document and segment, or up to it if `inclusive`."""
        total = x.cumsum(2)
        earlier = total - x
        return (total if inclusive else earlier) - earlier.gather(2, origin)

    grad = sum_before(of_keys, inclusive=False)
    if of_queries is not None:
        grad = grad - sum_before(of_queries, inclusive=decay_after_read)
    entering = of_entering.repeat_interleave(segment, 2)[..., : len(places)]
    return grad + entering.masked_fill((first >= begins)[:, None], 0.0)
