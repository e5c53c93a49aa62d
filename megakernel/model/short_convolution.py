"""The short convolution of a layer's queries, keys and values, in parts of the sequence as in the whole."""

import torch
from torch import Tensor, nn

from megakernel.attention import AttentionInputs
from megakernel.attention.heads import generator
from megakernel.ops.short_convolution import short_convolution
from megakernel.parallel.tensor import head_shard, mark_cut

from .settings import ModelSettings


class ShortConvolution(nn.Module):
    """A filter of the last W tokens for every channel of q, k and v, followed by SiLU (docs/formulas.md, 10).

    Tensor ranks have the filters of their heads. A shard of a sequence asks the one before it for its last W - 1
    tokens.
    """

    def __init__(self, settings: ModelSettings, index: int, width: int):
        """width: W; index: of the layer."""
        super().__init__()
        model = settings.model
        heads = head_shard(settings.mesh.tp).of(model.kv_heads, "num_kv_heads")
        self.width = width
        parts = model.num_heads // model.kv_heads + model.layer_attention(index).keys_per_head + 1
        draws = (generator((settings.seed, index), head, "short convolution") for head in heads)
        size = (parts, model.head_size, width)
        weights = torch.stack([torch.rand(size, generator=draw) for draw in draws])
        # As torch draws filters: the variance of a sum is a third of that of what is summed.
        self.weight = nn.Parameter((weights * 2 - 1) * width**-0.5)
        """(H_kv, heads of each key head, d, W)"""
        mark_cut(self.weight, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v after the filter, and the W - 1 tokens that the next ones continue from, inputs.state.

        Shapes as of an `AttentionLayer`. ValueError: a shard that is shorter than that.
        """
        whole = torch.cat([x.unflatten(1, (len(self.weight), -1)).flatten(2, -3) for x in (q, k, v)], 2)
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
            before = inputs.cp_shard.previous_tokens(whole, count)
        elif inputs.state is not None:
            before = inputs.state
        else:
            before = whole.new_zeros(*whole.shape[:-2], count, whole.shape[-1])
        left = torch.cat([before, whole], -2)[..., length:, :]
        whole = short_convolution(whole, self.weight, before, positions)
        q, k, v = (
            part.reshape(x.shape)
            for part, x in zip(
                whole.split([x.shape[1:-2].numel() // len(self.weight) for x in (q, k, v)], 2), (q, k, v)
            )
        )
        return q, k, v, left
