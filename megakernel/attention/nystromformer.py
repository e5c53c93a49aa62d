"""Nyströmformer: softmax attention through means over segments of the row."""

from typing import Any

import torch
from torch import Tensor, nn

from megakernel.attention.heads import HeadShard
from megakernel.attention.layer import AttentionLayer, Properties, rotate
from megakernel.attention.rotary import Rotary
from megakernel.attention.sequence import ContextParallelShard
from megakernel.attention.ulysses import Ulysses
from megakernel.config.landmark import Nystromformer
from megakernel.ops.documents import Positions
from megakernel.ops.nystrom_attention import depthwise_convolution, nystrom_attention


class NystromformerAttention(AttentionLayer):
    """s(Q L_K^T) s(L_Q L_K^T)^+ s(L_Q K^T) V, and a convolution of the values if asked for.

    Segments divide whole rows: documents in one row see each other. Shards of a row trade tokens for heads.
    """

    def __init__(
        self, form: Nystromformer, num_heads: int, num_kv_heads: int, head_dim: int, heads: HeadShard
    ):
        super().__init__(num_heads, num_kv_heads, head_dim, False, heads)
        self.landmarks = form.landmarks
        self.convolution: nn.Parameter | None = None
        if form.conv_kernel is not None:
            # From nothing: a new layer is Nyström attention alone.
            self.convolution = nn.Parameter(torch.zeros(len(self.query_heads), form.conv_kernel))

    @property
    def properties(self) -> Properties:
        """What this layer can do."""
        return Properties(False, recurrent=False, state_size=0, state_size_per_token=0, exchanges=("heads",))

    def sharded_parameters(self) -> dict[str, int]:
        """The filters."""
        return dict.fromkeys(self.state_dict(), 0)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        positions: Positions,
        rotary: Rotary | None,
        cp_shard: ContextParallelShard,
        key_mask: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = rotate(rotary, q, k, positions)
        rows = Ulysses(cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = rows.of_queries(q), rows.of_keys(k, v)
        places = torch.arange(q.shape[2], device=q.device)[None]
        count = q.shape[2] if key_mask is None else key_mask.sum(1, keepdim=True).clamp(min=1)
        # Real tokens lie first and fill all segments evenly; what lies behind them belongs to none.
        out = nystrom_attention(
            q, k, v, segments=places * self.landmarks // count, count=self.landmarks, key_mask=key_mask
        )
        if self.convolution is not None:
            values = v if key_mask is None else v * key_mask[:, None, :, None]
            out = out + depthwise_convolution(
                values.repeat_interleave(q.shape[1] // v.shape[1], 1), self.convolution[rows.query_heads]
            )
        return rows.cut(out), None
