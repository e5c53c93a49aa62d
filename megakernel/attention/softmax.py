"""Softmax attention, the quadratic baseline."""

from typing import Any

from torch import Tensor

from megakernel.attention.layer import AttentionLayer, Properties, rotate
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import SequencePiece
from megakernel.attention.whole_rows import WholeRows
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
        rows = WholeRows(piece, q.shape[1], k.shape[1])
        out, state = softmax_attention(
            rows.of_queries(q),
            *rows.of_keys(k, v),
            causal=self.causal,
            positions=rows.of_positions(positions, q.shape[2]),
            key_mask=None if self.causal else key_mask,
            initial_state=state,
        )
        return rows.cut(out), state
