"""Informer: full attention for the queries whose weights are the most uneven (docs/formulas.md, 12)."""

from typing import Any

import torch
from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.sequence import Ulysses
from megakernel.config.algebra import Informer
from megakernel.config.attention import Attention
from megakernel.papers.sparse import BITS
from megakernel.papers.sparse.draws import Draws
from megakernel.papers.sparse.informer_attention import chosen_numbers, informer_attention


class InformerAttention(AttentionLayer):
    """ProbSparse attention in its bidirectional form; the sampled keys are redrawn at every training step.

    Keys are sampled from whole sequences, so packed documents see each other. Context-parallel shards use the Ulysses
    all-to-all.
    """

    per_query_head = ("draws.values",)

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.informer = config.informer or Informer()
        self.draws = Draws(settings, "samples", interval=1)

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads."""
        return {"draws.values": 0}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.exchange_queries(q), ulysses.exchange_keys(k, v)
        length = q.shape[2]
        # Real tokens come first.
        counts = torch.full((len(q),), length, device=q.device) if inputs.counts is None else inputs.counts
        limit = self.informer.number(length)

        def sampled(places: Tensor) -> Tensor:
            draws = self.draws.at(places, limit, ulysses.query_heads)
            return draws * counts[:, None, None, None] >> BITS

        out = informer_attention(
            q,
            k,
            v,
            sampled=sampled,
            chosen=chosen_numbers(counts, self.informer.factor, self.informer.top),
            limit=limit,
            counts=counts,
        )
        return ulysses.restore(out), None
