"""Inputs of an attention layer besides queries, keys and values, passed from the model down to the mechanism."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
from megakernel.ops.documents import Positions
from megakernel.ops.state import Exchange
from megakernel.ops.window import Tail


@dataclass(frozen=True)
class AttentionInputs:
    """Positions, padding, shard and state of the N tokens of each sequence."""

    positions: Positions | None = None
    """(B, N) index of each token in its own document, counting real tokens, or the index of the first real token of
    sequences that hold one document each; None: each sequence is one document, which begins on the first shard."""

    padding_mask: Tensor | None = None
    """(B, N) bool, True for real tokens; None: all are real. In `attend` real tokens come first, so that causal real
    tokens cannot see padding."""

    rotary: Rotary | None = None
    """Rotates queries and keys, which come unrotated, when the mechanism asks for it."""

    cp_shard: ContextParallelShard = WHOLE_SEQUENCE
    """The context-parallel shard that these tokens are."""

    further: Tensor | None = None
    """(B, H_kv, N, n) a further projection of the layer's input, for mechanisms that need n numbers per head."""

    state: Any = None
    """The state before these tokens, of a type that the mechanism defines; None: the sequence starts here."""

    return_state: bool = True
    """Whether the state after the last token is needed; a mechanism may return one anyway."""

    @property
    def resolved_positions(self) -> Positions:
        """`positions`, which are never None in `attend`."""
        assert self.positions is not None
        return self.positions

    @property
    def counts(self) -> Tensor | None:
        """(B,) real tokens of each sequence; None: all are real."""
        return None if self.padding_mask is None else self.padding_mask.sum(1)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of states with earlier shards; None without context parallelism."""
        return self.cp_shard.start_prefix if self.cp_shard.size > 1 else None

    @property
    def exchange_after(self) -> Exchange | None:
        """The exchange of states with later shards; None without context parallelism."""
        return self.cp_shard.start_suffix if self.cp_shard.size > 1 else None

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k rotated by their positions; k: (B, H_kv, N, d) or (B, H_kv, M, N, d)."""
        if self.rotary is None:
            return q, k
        q, rotated_k = self.rotary.rotate_qk(q, k.flatten(1, -3), self.resolved_positions)
        return q, rotated_k.view_as(k)

    def halo(self, k: Tensor, v: Tensor, count: int) -> Tail:
        """The `count` tokens before this shard."""
        if count > k.shape[2]:
            raise ValueError(
                f"a shard of {k.shape[2]} tokens is shorter than the {count} tokens that its neighbor needs; "
                "use fewer shards or smaller blocks"
            )
        last = torch.cat([x[:, :, x.shape[2] - count :] for x in (k, v)], -1)
        return Tail(*self.cp_shard.previous_tokens(last, count).split([k.shape[-1], v.shape[-1]], -1))


DEFAULT_INPUTS = AttentionInputs()
"""Unsharded sequences of one document each, without padding or rotation."""
