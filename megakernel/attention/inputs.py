"""What an attention layer is told besides queries, keys and values, from the model's layer down to the mechanism."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import WHOLE, ContextParallelShard
from megakernel.ops.documents import Positions
from megakernel.ops.state import Exchange
from megakernel.ops.window import Tail


@dataclass(frozen=True)
class AttentionInputs:
    """Where the N tokens of each sequence stand, and which shard of the sequence they are."""

    positions: Positions | None = None
    """(B, N) place of each token in its own document, counting real tokens, or the place of the first token of
    sequences that hold one document each; None: every sequence is one document, which begins on the first shard."""

    padding_mask: Tensor | None = None
    """(B, N) bool, True for real tokens; None where all are. In `attend` real tokens lie first, so that no real token
    of a causal layer can see the others."""

    rotary: Rotary | None = None
    """Rotates queries and keys where the mechanism wants it: they come unrotated."""

    cp_shard: ContextParallelShard = WHOLE
    """Which shard of the sequence these tokens are."""

    further: Tensor | None = None
    """(B, H_kv, N, n) a further projection of the layer's input, for a mechanism that asks for n numbers per head."""

    state: Any = None
    """What the tokens continue from, of the mechanism's own kind; None: nothing."""

    wants_state: bool = True
    """Whether anybody reads the state behind the last token; a mechanism may give one all the same."""

    @property
    def at(self) -> Positions:
        """The positions, which `attend` always has."""
        assert self.positions is not None
        return self.positions

    @property
    def counts(self) -> Tensor | None:
        """(B,) real tokens of each sequence; None where all are real."""
        return None if self.padding_mask is None else self.padding_mask.sum(1)

    @property
    def exchange(self) -> Exchange | None:
        """How states meet what lies before this shard; None where it is the whole sequence."""
        return self.cp_shard.start_prefix if self.cp_shard.size > 1 else None

    @property
    def exchange_after(self) -> Exchange | None:
        """The same for what lies behind."""
        return self.cp_shard.start_suffix if self.cp_shard.size > 1 else None

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k at their positions; k as (B, H_kv, N, d) or (B, H_kv, M, N, d)."""
        if self.rotary is None:
            return q, k
        q, turned = self.rotary.both(q, k.flatten(1, -3), self.at)
        return q, turned.view_as(k)

    def halo(self, k: Tensor, v: Tensor, count: int) -> Tail:
        """The `count` tokens before this shard."""
        if count > k.shape[2]:
            raise ValueError(
                f"a shard of {k.shape[2]} tokens is shorter than the {count} tokens that its neighbour needs; "
                "use fewer shards or smaller blocks"
            )
        return Tail(self.cp_shard.previous_tokens(k, count), self.cp_shard.previous_tokens(v, count))


WHOLE_ROWS = AttentionInputs()
"""Sequences of one document each, without padding and rotation."""
