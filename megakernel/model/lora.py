"""Low-rank updates beside frozen projections (LoRA), cut over the tensor ranks as the projections are."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.config import Lora
from megakernel.parallel import replicated
from megakernel.parallel.tensor import mark_cut

from .settings import ModelSettings


class LowRankUpdate(nn.Module):
    """alpha / rank B A x, zero at first, for a projection from `inputs` to `outputs` numbers.

    cut: `outputs`, where tensor ranks share the projection's rows, or `inputs`, where they share its columns. The
    small product A x is what travels between the ranks.
    """

    def __init__(self, settings: ModelSettings, lora: Lora, inputs: int, outputs: int, cut: str):
        super().__init__()
        tp = settings.mesh.tp
        self.group = None if tp.size == 1 else tp.group
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
        mark_cut(shared, dimension)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, B, inputs), its tokens or its columns cut -> (N, B, outputs), cut the other way."""
        if self.group is None:
            return self.scale * F.linear(F.linear(x, self.down), self.up)
        from megatron.core import tensor_parallel

        if self.cut == "outputs":
            small = F.linear(x, replicated(self.down, self.shard_group))
            if self.sequence_parallel:
                small = tensor_parallel.gather_from_sequence_parallel_region(small, group=self.group)
            else:
                small = tensor_parallel.copy_to_tensor_model_parallel_region(small, group=self.group)
            return self.scale * F.linear(small, self.up)
        small = F.linear(x, self.down)
        if self.sequence_parallel:
            small = tensor_parallel.reduce_scatter_to_sequence_parallel_region(small, group=self.group)
        else:
            small = tensor_parallel.reduce_from_tensor_model_parallel_region(small, group=self.group)
        return self.scale * F.linear(small, replicated(self.up, self.shard_group))
