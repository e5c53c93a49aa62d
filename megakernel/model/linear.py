"""The matrices of a model: Megatron-core's, cut over the tensor ranks, or whole in a process that stands alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn

from megakernel.parallel import OneProcess

from .settings import ModelSettings


def column_linear(settings: ModelSettings) -> type[Any]:
    """The class of matrices whose rows tensor ranks share."""
    return WholeLinear if isinstance(settings.mesh, OneProcess) else ColumnParallelLinear


def row_linear(settings: ModelSettings) -> type[Any]:
    """The class of matrices whose columns tensor ranks share."""
    return WholeLinear if isinstance(settings.mesh, OneProcess) else RowParallelLinear


def embedding(settings: ModelSettings) -> Any:
    """Token ids (B, N) to (B, N, C), or to (N / tp, B, C) under sequence parallelism."""
    sizes = (settings.embedding_rows, settings.model.hidden_size)
    transformer = settings.transformer
    if isinstance(settings.mesh, OneProcess):
        weight = torch.empty(sizes)
        transformer.init_method(weight)
        return nn.Embedding.from_pretrained(weight, freeze=False)
    return VocabParallelEmbedding(
        *sizes,
        init_method=transformer.init_method,
        reduce_scatter_embeddings=settings.mesh.sequence_parallel,
        config=transformer,
        tp_group=settings.mesh.tp.group,
    )


class WholeLinear(nn.Module):
    """What Megatron-core's column and row parallel matrices are in one process, without asking for groups."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool = False,
        **_: Any,
    ):
        """skip_bias_add: hand the bias out instead of adding it. What else Megatron-core passes is about cuts."""
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        init_method(self.weight)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x (..., inputs) -> (..., outputs), and the bias that is still to be added."""
        if self.skip_bias_add:
            return F.linear(x, self.weight), self.bias
        return F.linear(x, self.weight, self.bias), None
