"""Low-rank updates beside frozen projections (LoRA), cut over the tensor ranks as the projections are."""

import math

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from megakernel.config import Lora
from megakernel.parallel import replicated

from .settings import ModelSettings


class LowRankUpdate(nn.Module):
    """alpha / rank B A x, zero at first, for a projection from `inputs` to `outputs` numbers.

    cut: `outputs`, where tensor ranks share the projection's rows, or `inputs`, where they share its columns. The
    small product A x is what travels between the ranks.
    """

    def __init__(self, settings: ModelSettings, lora: Lora, inputs: int, outputs: int, cut: str):
        super().__init__()
        tp = settings.mesh.tp
        self.group = tp.group
        self.sequence_parallel = settings.mesh.sequence_parallel
        self.shard_group = tp.group if self.sequence_parallel else None
        self.cut = cut
        self.scale = lora.alpha / lora.rank
        bound = 1 / math.sqrt(inputs)
        down = torch.empty(lora.rank, inputs).uniform_(-bound, bound)  # whole, then cut
        if cut == "inputs":
            down = down.chunk(tp.size, 1)[tp.rank].clone()
        else:
            outputs //= tp.size
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(outputs, lora.rank))
        shared, dimension = (self.down, 1) if cut == "inputs" else (self.up, 0)
        set_tensor_model_parallel_attributes(shared, True, dimension, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, B, inputs), its tokens or its columns cut -> (N, B, outputs), cut the other way."""
        if self.cut == "outputs":
            small = F.linear(x, replicated(self.down, self.shard_group))
            if self.sequence_parallel:
                small = gather_from_sequence_parallel_region(small, group=self.group)
            else:
                small = copy_to_tensor_model_parallel_region(small, group=self.group)
            return self.scale * F.linear(small, self.up)
        small = F.linear(x, self.down)
        if self.sequence_parallel:
            small = reduce_scatter_to_sequence_parallel_region(small, group=self.group)
        else:
            small = reduce_from_tensor_model_parallel_region(small, group=self.group)
        return self.scale * F.linear(small, replicated(self.up, self.shard_group))
