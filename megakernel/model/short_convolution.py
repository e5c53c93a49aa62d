"""The short convolution of a layer's queries, keys and values."""

import torch
from torch import Tensor, nn

from megakernel.attention import AttentionInputs
from megakernel.attention.heads import generator
from megakernel.ops.short_convolution import short_convolution
from megakernel.parallel.tensor import head_shard, mark_partitioned

from .settings import ModelSettings


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of q, k and v over W tokens, followed by SiLU (docs/formulas.md, 10).

    Tensor ranks have the filters of their heads. A context-parallel shard gets the last W - 1 tokens of the previous
    shard.
    """

    def __init__(self, settings: ModelSettings, index: int, width: int):
        """width: W. index: layer index."""
        super().__init__()
        model = settings.model
        heads = head_shard(settings.mesh.tp).of(model.kv_heads, "num_kv_heads")
        self.width = width
        parts = model.num_heads // model.kv_heads + model.layer_attention(index).keys_per_head + 1
        draws = (generator((settings.seed, index), head, "short convolution") for head in heads)
        size = (parts, model.head_size, width)
        weights = torch.stack([torch.rand(size, generator=draw) for draw in draws])
        # Initialized as in nn.Conv1d: uniform in +-1/sqrt(W), so an output has a third of the inputs' variance.
        self.weight = nn.Parameter((weights * 2 - 1) * width**-0.5)
        """(H_kv, heads of each key head, d, W)"""
        mark_partitioned(self.weight, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v after the convolution, and their last W - 1 tokens before it: the next call's inputs.state.

        Shapes are those of an `AttentionLayer`. ValueError: a shard shorter than W - 1 tokens.
        """
        channels = torch.cat([x.unflatten(1, (len(self.weight), -1)).flatten(2, -3) for x in (q, k, v)], 2)
        positions = inputs.positions
        count, length = self.width - 1, q.shape[2]
        if positions is None:
            positions = inputs.cp_shard.rank * length
        if inputs.cp_shard.size > 1:
            if length < count:
                raise ValueError(
                    f"a shard of {length} tokens is shorter than the {count} that short_convolution={self.width} looks "
                    "back at; use fewer shards or longer sequences"
                )
            previous = inputs.cp_shard.previous_tokens(channels, count)
        elif inputs.state is not None:
            previous = inputs.state
        else:
            previous = channels.new_zeros(*channels.shape[:-2], count, channels.shape[-1])
        tail = torch.cat([previous, channels], -2)[..., length:, :]
        channels = short_convolution(channels, self.weight, previous, positions)
        q, k, v = (
            part.reshape(x.shape)
            for part, x in zip(
                channels.split([x.shape[1:-2].numel() // len(self.weight) for x in (q, k, v)], 2), (q, k, v)
            )
        )
        return q, k, v, tail
