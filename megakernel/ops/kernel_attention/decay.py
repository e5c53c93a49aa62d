"""States that decay, in kernels that know none of it but a log scale for each key.

A key that entered its segment when exp(c) was left of the state counts exp(-c), and a query that reads when exp(c) is
left multiplies by that: c are sums of log decays from the segment's beginning. Between segments the states themselves
decay (`states.pass_states`).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.kernel_attention.arguments import SequenceInfo


class Decay(NamedTuple):
    """What is left of a state that decays: logarithms, relative to where the segment begins, float32."""

    of_keys: Any
    """(B, H_kv, keys): where each key enters the state. It counts exp of minus that."""

    of_queries: Any
    """(B, H_kv, N): where each query reads it, with what weights are scaled by."""

    of_segments: Any
    """(B, H_kv, segments): behind each segment."""

    @staticmethod
    def of_tokens(log_decay: Tensor, segment: int, scale: float) -> "Decay":
        """log_decay: (B, H_kv, N) of each token, before its key and its query. scale: of all weights."""
        behind, of_segments = Decay._behind(log_decay, segment)
        return Decay(behind, behind + math.log(scale), of_segments)

    @staticmethod
    def of_blocks(log_decay: Tensor, segment: int, places: Tensor, rank: int) -> "Decay":
        """log_decay: (B, H_kv, N) of each token, before the keys that enter there and behind its query.

        places: (B or 1, blocks) of the tokens where `rank` landmarks enter, negative where none do.
        """
        behind, of_segments = Decay._behind(log_decay, segment)
        at = places.clamp(min=0).to(torch.int64)[:, None].expand(*log_decay.shape[:2], -1)
        of_keys = behind.gather(2, at).repeat_interleave(rank, 2)
        return Decay(of_keys, behind - log_decay, of_segments)

    @staticmethod
    def _behind(log_decay: Tensor, segment: int) -> tuple[Tensor, Tensor]:
        """Logarithms behind each token and each segment."""
        length = log_decay.shape[2]
        logs = F.pad(log_decay, (0, -length % segment)).unflatten(2, (-1, segment))
        within = logs.cumsum(3)
        return within.flatten(2, 3)[..., :length].contiguous(), within[..., -1].contiguous()


def gradient_of_decay(
    of_keys: Tensor,
    of_queries: Tensor | None,
    along: Tensor | None,
    of_first: Tensor | None,
    seq: SequenceInfo,
    segment: int,
    *,
    late: bool,
) -> Tensor:
    """(B, H_kv, N): the gradient of each token's log decay, from those of the logarithms that it is a term of.

    The decay of token s counts for keys that entered before s and queries behind it, of its document: for all that such
    keys give, less what queries up to s got. Sums begin anew in each segment: over all tokens, what is lost to rounding
    would add up.

    Args:
        of_keys: (B, H_kv, N), of the logarithm of what each key counts.
        of_queries: (B, H_kv, N), of all weights of each query; None where they add up to 1, which leaves nothing.
        along: (B, H_kv, segments), of the state that enters each segment, see `Call.pass_on`; None takes all tokens for
            one segment.
        of_first: (B, H_kv), of the state that enters the sequence. Of a shard, whose own sums are the last state, that
            is not what `along` says: it has what the first state would add to the last.
        segment: tokens of one.
        late: a query sees the state that its own token has not decayed yet.
    """
    if along is None:
        segment, along = seq.length, of_keys.new_zeros(*of_keys.shape[:2], 1)
    if of_first is not None:
        along = along - along[..., :1] + of_first[..., None]
    places = torch.arange(of_keys.shape[2], device=of_keys.device)
    begins = places // segment * segment
    first = places.new_full((1, len(places)), seq.start) if seq.starts is None else seq.starts.to(torch.int64)
    origin = torch.maximum(first, begins)[:, None].expand_as(of_keys)

    def before(x: Tensor, own: bool) -> Tensor:
        """Sums over the tokens before each one, and `own` ones."""
        total = x.cumsum(2)
        earlier = total - x
        return (total if own else earlier) - earlier.gather(2, origin)

    found = before(of_keys, own=False)
    if of_queries is not None:
        found = found - before(of_queries, own=late)
    entering = along.repeat_interleave(segment, 2)[..., : len(places)]
    return found + entering.masked_fill((first >= begins)[:, None], 0.0)
