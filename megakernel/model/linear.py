"""The matrices of a model: Megatron-core's, cut over the tensor ranks, or whole in a process that stands alone.

Megatron-core, which takes seconds to import, is asked for where a mesh has processes: generating need not wait for it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megakernel.config import Lora
from megakernel.parallel import OneProcess, replicated
from megakernel.parallel.tensor import mark_cut

from .settings import ModelSettings


def column_linear(
    settings: ModelSettings,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    skip_bias_add: bool = False,
    stride: int = 1,
) -> Any:
    """A matrix whose rows tensor ranks share.

    skip_bias_add: see `apply`. stride: parts of the rows, each of which is shared.
    """
    if isinstance(settings.mesh, OneProcess):
        return WholeLinear(inputs, outputs, bias, settings.draw, settings.device)
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(
        inputs,
        outputs,
        config=settings.transformer,
        init_method=settings.draw,
        bias=bias,
        gather_output=False,
        skip_bias_add=skip_bias_add,
        stride=stride,
        tp_group=settings.mesh.tp.group,
    )


def row_linear(settings: ModelSettings, inputs: int, outputs: int, *, bias: bool) -> Any:
    """A matrix whose columns tensor ranks share, at the end of a branch; its bias is left to `apply`'s caller."""
    if isinstance(settings.mesh, OneProcess):
        return WholeLinear(inputs, outputs, bias, settings.draw_output, settings.device)
    from megatron.core.tensor_parallel import RowParallelLinear

    return RowParallelLinear(
        inputs,
        outputs,
        config=settings.transformer,
        init_method=settings.draw_output,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=settings.mesh.tp.group,
    )


def column_input(x: Tensor, settings: ModelSettings) -> Tensor:
    """All tokens (N, B, C) of x, so that a product with this tensor rank's rows of a matrix has right gradients.

    Each rank's rows give part of the gradient of x: backward sums the parts.
    """
    tp = settings.mesh.tp
    if tp.size == 1:
        return x
    from megatron.core import tensor_parallel

    if settings.mesh.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(x, group=tp.group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=tp.group)


def apply(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x (..., inputs) -> (..., outputs), and the bias that is still to be added, which Megatron-core's hand out."""
    output = linear(x)
    return output if isinstance(output, tuple) else (output, None)


def embedding(settings: ModelSettings) -> Any:
    """Token ids (B, N) to (B, N, C), or to (N / tp, B, C) under sequence parallelism."""
    sizes = (settings.padded_vocab_size, settings.model.hidden_size)
    if isinstance(settings.mesh, OneProcess):
        weight = torch.empty(sizes, device=settings.device)
        settings.draw(weight)
        return nn.Embedding.from_pretrained(weight, freeze=False)
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    return VocabParallelEmbedding(
        *sizes,
        init_method=settings.draw,
        reduce_scatter_embeddings=settings.mesh.sequence_parallel,
        config=settings.transformer,
        tp_group=settings.mesh.tp.group,
    )


class WholeLinear(nn.Linear):
    """What Megatron-core's column and row parallel matrices are in one process, without asking for groups."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, draw: Callable[[Tensor], Any], device: str | None
    ):
        """draw: fills the matrix; the bias begins at 0."""
        self._draw = draw
        super().__init__(inputs, outputs, bias, device)

    def reset_parameters(self) -> None:
        """Draw the matrix; nothing else is drawn, so that weights are those of every layout."""
        self._draw(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs); the bias is added to the rounded product, as Megatron-core does."""
        output = F.linear(x, self.weight)
        return output if self.bias is None else output + self.bias


def low_rank_update(
    settings: ModelSettings, target: str, inputs: int, outputs: int, parallel: str
) -> "LowRankUpdate | None":
    """The update of the matrix that settings.lora calls `target`; None where it does not name that."""
    if settings.lora is None or target not in settings.lora.targets:
        return None
    return LowRankUpdate(settings, settings.lora, inputs, outputs, parallel)


def updated(
    parts: Sequence[Tensor],
    updates: Sequence[nn.Module | None],
    x: Tensor,
    form: Callable[[Tensor], Tensor] = lambda update: update,
) -> list[Tensor]:
    """Each part of a fused product of x with its update, where it has one, in the part's form."""
    return [
        part if update is None else part + form(update(x))
        for part, update in zip(parts, updates, strict=True)
    ]


class LowRankUpdate(nn.Module):
    """alpha / rank B A x, zero at first, for a projection from `inputs` to `outputs` numbers.

    parallel: `column` or `row`, as the projection's outputs or inputs are partitioned over tensor ranks. The small
    product A x is what travels between them.
    """

    def __init__(self, settings: ModelSettings, lora: Lora, inputs: int, outputs: int, parallel: str):
        super().__init__()
        tp = settings.mesh.tp
        self.settings, self.parallel = settings, parallel
        self.shard_group = tp.group if settings.mesh.sequence_parallel else None
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout
        bound = 1 / math.sqrt(inputs)
        down = torch.empty(lora.rank, inputs).uniform_(-bound, bound)  # whole, then cut
        if parallel == "row":
            down = down.chunk(tp.size, 1)[tp.rank].clone()
        else:
            outputs //= tp.size
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(outputs, lora.rank))
        shared, dimension = (self.down, 1) if parallel == "row" else (self.up, 0)
        mark_cut(shared, dimension)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, B, inputs), its tokens or its columns cut -> (N, B, outputs), cut the other way."""
        x = F.dropout(x, self.dropout, self.training and self.dropout > 0)
        if self.parallel == "column":
            small = column_input(F.linear(x, replicated(self.down, self.shard_group)), self.settings)
            return self.scale * F.linear(small, self.up)
        small = F.linear(x, self.down)
        if (tp := self.settings.mesh.tp).size > 1:
            from megatron.core import tensor_parallel

            if self.settings.mesh.sequence_parallel:
                small = tensor_parallel.reduce_scatter_to_sequence_parallel_region(small, group=tp.group)
            else:
                small = tensor_parallel.reduce_from_tensor_model_parallel_region(small, group=tp.group)
        return self.scale * F.linear(small, replicated(self.up, self.shard_group))
