"""The short convolution of a layer's queries, keys and values."""

import torch
from torch import Tensor, nn

from megakernel.attention import AttentionInputs
from megakernel.attention.heads import generator
from megakernel.ops.short_convolution import short_convolution
from megakernel.parallel.partition import Partition
from megakernel.parallel.tensor import head_shard

from .settings import ModelSettings


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of q, k and v over W tokens, followed by SiLU (docs/formulas.md, 10).

    Tensor ranks have the filters of their heads, or all filters of a key head that several ranks hold. A
    context-parallel shard gets the last W - 1 tokens of the previous shard.
    """

    def __init__(self, settings: ModelSettings, index: int, width: int):
        """width: W. index: layer index."""
        super().__init__()
        model = settings.model
        tp, copies = settings.mesh.tp, settings.copies
        self.heads = head_shard(tp, copies)
        heads, queries = self.heads.of_keys(model.kv_heads), model.num_heads // model.kv_heads
        self.width = width
        parts = queries + model.layer_attention(index).keys_per_head + 1
        self.other_queries = (0, 0)
        """Queries of the key head before and after those of this rank."""
        if copies is not None:
            own = queries // copies.size
            self.other_queries = (copies.rank * own, queries - (copies.rank + 1) * own)
        self.queries = queries
        draws = (generator((settings.seed, index), head, "short convolution") for head in heads)
        size = (parts, model.head_size, width)
        weights = torch.stack([torch.rand(size, generator=draw) for draw in draws])
        # Initialized as in nn.Conv1d: uniform in +-1/sqrt(W), so an output has a third of the inputs' variance.
        self.weight = nn.Parameter((weights * 2 - 1) * width**-0.5)
        """(H_kv, heads of each key head, d, W)"""
        Partition(0, copies=copies.size if copies else 1).mark(self.weight, tp.rank)

    def forward(self, channels: Tensor, inputs: AttentionInputs) -> Tensor:
        """Queries, keys and values (N, B, H_kv, heads of each key head, d) -> the same after the convolution.

        N: tokens of this context-parallel shard. inputs: positions, shard, and a state from `next_state` or None.
        ValueError: a shard shorter than W - 1 tokens.
        """
        x, positions, shard = channels.permute(1, 2, 3, 0, 4), inputs.positions, inputs.cp_shard
        count, length, before = self.width - 1, len(channels), inputs.state
        if shard.size > 1:
            if length < count:
                raise ValueError(
                    f"a shard of {length} tokens is shorter than the {count} that short_convolution={self.width} looks "
                    "back at; use fewer shards or longer sequences"
                )
            before = shard.previous_tokens(x, count)
        if positions is None:
            positions = shard.rank * length
        return short_convolution(x, self._own_filters(), before, positions).permute(3, 0, 1, 2, 4)

    def _own_filters(self) -> Tensor:
        """The filters of the heads that this rank has."""
        weight, (before, after) = self.heads.of_key_head(self.weight), self.other_queries
        if before + after == 0:
            return weight
        return torch.cat([weight[:, before : self.queries - after], weight[:, self.queries :]], 1)

    def next_state(self, channels: Tensor, state: Tensor | None) -> Tensor:
        """The last W - 1 tokens (B, H_kv, heads of each key head, W - 1, d) of those in `state` and `channels`."""
        last = channels[-min(len(channels), self.width - 1) :].permute(1, 2, 3, 0, 4)
        if state is None:
            state = last.new_zeros(*last.shape[:3], self.width - 1, last.shape[4])
        return torch.cat([state, last], -2)[..., last.shape[3] :, :]
