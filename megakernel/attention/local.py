"""Windowed softmax attention: FLuRKA's near part alone."""

from typing import Any

from torch import Tensor

from megakernel.attention.heads import HeadShard
from megakernel.attention.layer import AttentionLayer, Properties
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import SequencePiece
from megakernel.config.attention import Near
from megakernel.ops import Tail, window_attention
from megakernel.ops.documents import Positions


class LocalAttention(AttentionLayer):
    """Causal softmax over a token's own block, optionally with the block before."""

    def __init__(self, near: Near, num_heads: int, num_kv_heads: int, head_dim: int, heads: HeadShard):
        super().__init__(num_heads, num_kv_heads, head_dim, True, heads)
        assert near.block_size is not None
        self.block_size = near.block_size
        self.blocks = near.blocks

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        state = 2 * len(self.kv_heads) * self.head_dim * self.block_size * self.blocks
        return Properties(True, recurrent=True, state_size=state, state_size_per_token=0, exchanges=("halo",))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Positions,
        rotary: Rotary | None,
        piece: SequencePiece,
        key_mask: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        if piece.size > 1:
            state = halo(piece, k, v, self.block_size * self.blocks)
        return window_attention(
            q,
            k,
            v,
            block_size=self.block_size,
            blocks=self.blocks,
            rotary=rotary,
            positions=positions,
            initial_state=state,
        )


def halo(piece: SequencePiece, k: Tensor, v: Tensor, count: int) -> Tail:
    """The `count` tokens before a piece."""
    if count > k.shape[2]:
        raise ValueError(
            f"a piece of {k.shape[2]} tokens is shorter than the {count} tokens that its neighbour needs; "
            "use fewer pieces or smaller blocks"
        )
    return Tail(piece.previous_tokens(k, count), piece.previous_tokens(v, count))
