"""Softmax attention, the quadratic baseline."""

from typing import Any

from torch import Tensor

from megakernel.attention.layer import AttentionLayer, Properties, rotate
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import SequencePiece
from megakernel.ops import softmax_attention
from megakernel.ops.documents import Positions


class SoftmaxAttention(AttentionLayer):
    """softmax(q k^T / sqrt(d)) v. Pieces of a sequence trade tokens for heads, so that each sees whole rows."""

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        per_token = 2 * len(self.kv_heads) * self.head_dim
        return Properties(
            self.causal, recurrent=False, state_size=0, state_size_per_token=per_token, exchanges=("heads",)
        )

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
        q, k = rotate(rotary, q, k, positions)
        if piece.size == 1:
            return softmax_attention(
                q,
                k,
                v,
                causal=self.causal,
                positions=positions,
                key_mask=None if self.causal else key_mask,
                initial_state=state,
            )
        if q.shape[1] % piece.size:
            raise ValueError(
                f"{q.shape[1]} heads do not divide over {piece.size} pieces of the sequence; change one"
            )
        if k.shape[1] % piece.size:
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        whole: Positions = 0
        if isinstance(positions, Tensor):
            # Each piece hands every other its positions the way it hands over a head.
            per_head = positions[:, None, :, None].expand(-1, piece.size, -1, -1)
            whole = piece.tokens_to_heads(per_head)[:, 0, :, 0]
        out, _ = softmax_attention(
            *map(piece.tokens_to_heads, (q, k, v)), causal=self.causal, positions=whole
        )
        return piece.heads_to_tokens(out), None
