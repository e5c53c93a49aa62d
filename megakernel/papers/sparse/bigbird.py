"""BigBird: windows of blocks, global blocks and random blocks (docs/formulas.md, 12)."""

from typing import Any

import torch
from torch import Tensor

from megakernel.attention.heads import LayerSettings
from megakernel.attention.inputs import AttentionInputs
from megakernel.attention.layer import AttentionLayer
from megakernel.attention.sequence import Ulysses
from megakernel.config.algebra import Bigbird
from megakernel.config.attention import Attention
from megakernel.papers.sparse.bigbird_attention import bigbird_attention, choose_blocks
from megakernel.papers.sparse.draws import Draws


class BigbirdAttention(AttentionLayer):
    """Softmax over the blocks that a query's block reads. The random ones are the same throughout a run.

    Blocks divide whole sequences, so packed documents see each other. Context-parallel shards use the Ulysses
    all-to-all.
    """

    per_query_head = ("draws.values",)

    def __init__(self, config: Attention, settings: LayerSettings):
        super().__init__(config, settings)
        self.bigbird = config.bigbird or Bigbird()
        self.draws = Draws(settings, "blocks")

    def sharded_parameters(self) -> dict[str, int]:
        """Name -> dimension that counts heads."""
        return {"draws.values": 0}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Any]:
        """See AttentionLayer."""
        q, k = inputs.rotated(q, k)
        ulysses = Ulysses(inputs.cp_shard, q.shape[1], k.shape[1])
        q, (k, v) = ulysses.exchange_queries(q), ulysses.exchange_keys(k, v)
        size, reach, length = self.bigbird.block_size, self.bigbird.window_blocks // 2, q.shape[2]
        # Real tokens come first.
        counts = torch.full((1,), length, device=q.device) if inputs.counts is None else inputs.counts
        places = torch.arange(-(-length // size), device=q.device)
        draws = self.draws.at(places, self.bigbird.random_blocks, ulysses.query_heads)
        blocks = choose_blocks(draws, (counts + size - 1) // size, reach)
        out = bigbird_attention(
            q, k, v, random_blocks=blocks, block_size=size, reach=reach, counts=counts.expand(len(q))
        )
        return ulysses.restore(out), None
