"""Nyströmformer: softmax attention through means over segments of the row."""

from typing import Any

import torch
from torch import Tensor, nn

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.ulysses import Ulysses
from megakernel.config.algebra import Nystromformer
from megakernel.config.attention import Attention
from megakernel.ops.nystrom_attention import depthwise_convolution, nystrom_attention


class NystromformerAttention(AttentionLayer):
    """s(Q L_K^T) s(L_Q L_K^T)^+ s(L_Q K^T) V, and a convolution of the values if asked for.

    Segments divide whole rows: documents in one row see each other. Shards of a row trade tokens for heads.
    """

    def __init__(self, form: Attention, settings: LayerSettings):
        super().__init__(form, settings)
        nystrom = form.nystromformer or Nystromformer()
        self.landmarks = nystrom.landmarks
        self.convolution: nn.Parameter | None = None
        if nystrom.conv_kernel is not None:
            # From nothing: a new layer is Nyström attention alone.
            self.convolution = nn.Parameter(torch.zeros(len(self.query_heads), nystrom.conv_kernel))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        rows = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = rows.of_queries(q), rows.of_keys(k, v)
        real = inputs.padding_mask
        places = torch.arange(q.shape[2], device=q.device)[None]
        count = q.shape[2] if real is None else real.sum(1, keepdim=True).clamp(min=1)
        # Real tokens lie first and fill all segments evenly; what lies behind them belongs to none.
        out = nystrom_attention(
            q, k, v, segments=places * self.landmarks // count, count=self.landmarks, key_mask=real
        )
        if self.convolution is not None:
            values = v if real is None else v * real[:, None, :, None]
            out = out + depthwise_convolution(
                values.repeat_interleave(q.shape[1] // v.shape[1], 1), self.convolution[rows.query_heads]
            )
        return rows.cut(out), None
