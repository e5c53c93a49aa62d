"""Reformer: attention within chunks of tokens that hash alike (docs/formulas.md, 12)."""

from typing import Any

import torch
from torch import Tensor

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.noise import Noise
from megakernel.attention.sequence import Ulysses
from megakernel.config.algebra import Reformer
from megakernel.config.attention import Attention
from megakernel.papers.sparse.reformer_attention import reformer_attention


class ReformerAttention(AttentionLayer):
    """LSH attention, whose keys are its queries; the rotations are redrawn at every training step.

    The layer's own keys are not used. Whole sequences are sorted, so packed documents see each other. Context-parallel
    shards use the Ulysses all-to-all.
    """

    per_query_head = ("rotations.values",)

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        reformer = config.reformer or Reformer()
        self.chunk_size = reformer.chunk_size
        size = (reformer.rounds, settings.head_dim, reformer.buckets // 2)

        def draw(number: int) -> Tensor:
            streams = (generator(settings.seed, head, number, "rotations") for head in self.query_heads)
            return torch.stack([torch.randn(size, generator=s, device="cpu") for s in streams])

        self.rotations = Noise(draw, interval=1)

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads."""
        return {"rotations.values": 0}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (v,) = ulysses.exchange_queries(q), ulysses.exchange_keys(v)
        out = reformer_attention(
            q,
            v,
            rotations=self.rotations()[ulysses.query_heads],
            chunk_size=self.chunk_size,
            counts=inputs.counts,
        )
        return ulysses.restore(out), None
