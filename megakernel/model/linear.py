"""Linear layers: Megatron-core's tensor-parallel ones, or whole matrices where there are no process groups.

Megatron-core takes seconds to import, so generation, evaluation and exports do without it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megakernel.config import Lora
from megakernel.parallel import OneProcess, replicated
from megakernel.parallel.partition import Partition

from .float8 import ATTRIBUTE as FLOAT8
from .settings import ModelSettings


def column_linear(
    settings: ModelSettings,
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    skip_bias_add: bool = False,
    stride: int = 1,
    fan_out: int | None = None,
    parts: tuple[int, ...] = (),
) -> Any:
    """A column-parallel linear layer: each tensor rank has some of the output rows.

    skip_bias_add: see `apply_linear`. stride: stacked matrices, each of which is partitioned. fan_out: rows of each
    stacked matrix for its initial values; None: outputs / stride. parts: see `Partition`.
    """
    init_method = settings.init_method(fan_out or outputs // stride)
    if isinstance(settings.mesh, OneProcess):
        whole = WholeLinear(inputs, outputs, bias, init_method, settings.device)
        settings.init_bias(whole.bias, inputs, lambda numbers: numbers, outputs)
        return whole
    from megatron.core.tensor_parallel import ColumnParallelLinear

    tp = settings.mesh.tp
    partition = Partition(0, stride, parts=parts)

    def init_stacked(shards: Tensor) -> None:
        """Initialize the rows of all ranks in their order, in which Megatron-core cuts them."""
        init_method(shards)
        if parts:
            whole = shards.clone()
            shards.copy_(torch.cat([partition.shard(whole, rank, tp.size) for rank in range(tp.size)]))

    linear = ColumnParallelLinear(
        inputs,
        outputs,
        config=settings.transformer,
        init_method=init_stacked,
        bias=bias,
        gather_output=False,
        skip_bias_add=skip_bias_add,
        stride=stride,
        tp_group=tp.group,
    )
    settings.init_bias(
        linear.bias, inputs, lambda numbers: partition.shard(numbers, tp.rank, tp.size), outputs
    )
    for parameter in linear.parameters():
        partition.mark(parameter, tp.rank)
    return linear


def row_linear(settings: ModelSettings, inputs: int, outputs: int, *, bias: bool) -> Any:
    """A row-parallel linear layer at the end of a branch; see `apply_linear` for its bias."""
    init_method = settings.init_method(outputs, ends_branch=True)
    if isinstance(settings.mesh, OneProcess):
        whole = WholeLinear(inputs, outputs, bias, init_method, settings.device)
        settings.init_bias(whole.bias, inputs, lambda numbers: numbers, outputs)
        return whole
    from megatron.core.tensor_parallel import RowParallelLinear

    linear = RowParallelLinear(
        inputs,
        outputs,
        config=settings.transformer,
        init_method=init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=True,
        tp_group=settings.mesh.tp.group,
    )
    settings.init_bias(linear.bias, inputs, lambda numbers: numbers, outputs)
    return linear


def stack(weight: Tensor, rows: Sequence[int]) -> None:
    """Record that the rows of a whole weight are those of several matrices: groups of `rows`, one after the other."""
    weight.stacked_rows = tuple(rows)  # type: ignore[attr-defined]


def stacked_rows(weight: Tensor) -> tuple[int, ...]:
    """What `stack` has recorded: the rows of each of the matrices in a group; empty for a single matrix."""
    return getattr(weight, "stacked_rows", ())


def column_input(x: Tensor, settings: ModelSettings) -> Tensor:
    """All tokens (N, B, C) of x, for a product with this tensor rank's rows of a matrix.

    Each rank's rows give part of the gradient of x; backward sums these.
    """
    tp = settings.mesh.tp
    return x if tp.size == 1 else _column_input(x, tp.group, settings.mesh.sequence_parallel)


def _column_input(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    from megatron.core import tensor_parallel

    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(x, group=group)
    return tensor_parallel.copy_to_tensor_model_parallel_region(x, group=group)


def _row_output(x: Tensor, group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """The sum over tensor ranks of the products (N, B, C) of a row-parallel matrix."""
    from megatron.core import tensor_parallel

    if sequence_parallel:
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(x, group=group)
    return tensor_parallel.reduce_from_tensor_model_parallel_region(x, group=group)


def apply_linear(linear: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x (..., inputs) -> (..., outputs), and the bias that Megatron-core's layers leave to the caller, or None."""
    is_megatrons = not isinstance(linear, (WholeLinear, KeyHeadLinear))
    float8 = getattr(linear, FLOAT8, None) if linear.training else None
    if is_megatrons and (float8 is not None or torch.compiler.is_compiling()):
        return _from_weights(linear, x, float8 or F.linear)
    output = linear(x)
    return output if isinstance(output, tuple) else (output, None)


def _from_weights(
    linear: Any, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """What Megatron-core's layer computes, from its weights and collectives. product: of x and the matrix's transpose.

    Without what a compiler cannot trace: a warning in every call of a row-parallel layer, and handles of collectives
    that run beside the products.
    """
    from megatron.core import tensor_parallel

    is_row, group = isinstance(linear, tensor_parallel.RowParallelLinear), linear.tp_group
    if group.size() > 1 and not is_row:
        x = _column_input(x, group, linear.sequence_parallel)
    output = product(x, linear.weight)
    if group.size() > 1 and is_row:
        output = _row_output(output, group, linear.sequence_parallel)
    if linear.bias is None or linear.skip_bias_add:
        return output, linear.bias
    return output + linear.bias, None


def embedding(settings: ModelSettings) -> Any:
    """An embedding layer: token ids (B, N) -> (B, N, C), or (N / tp, B, C) under sequence parallelism."""
    sizes = (settings.padded_vocab_size, settings.model.hidden_size)
    if isinstance(settings.mesh, OneProcess):
        weight = torch.empty(sizes, device=settings.device)
        settings.embedding_init_method(weight)
        return nn.Embedding.from_pretrained(weight, freeze=False)
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    return VocabParallelEmbedding(
        *sizes,
        init_method=settings.embedding_init_method,
        reduce_scatter_embeddings=settings.mesh.sequence_parallel,
        config=settings.transformer,
        tp_group=settings.mesh.tp.group,
    )


class WholeLinear(nn.Linear):
    """A linear layer equal to Megatron-core's parallel ones on one rank, without process groups."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, init_method: Callable[[Tensor], Any], device: str | None
    ):
        """init_method: initializes the matrix; the bias is 0."""
        self._init_method = init_method
        super().__init__(inputs, outputs, bias, device)

    def reset_parameters(self) -> None:
        """Initialize without other random draws, so that weights do not depend on the layout."""
        self._init_method(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs); the bias is added to the rounded product, as Megatron-core does."""
        output = F.linear(x, self.weight)
        return output if self.bias is None else output + self.bias


class KeyHeadLinear(nn.Module):
    """A projection to n numbers per key head, of a key head that several tensor ranks hold: each has its n rows."""

    def __init__(self, settings: ModelSettings, inputs: int, per_head: int):
        super().__init__()
        tp, copies, heads = settings.mesh.tp, settings.copies, settings.model.kv_heads
        assert copies is not None
        self.settings, self.group = settings, copies.group
        whole = torch.empty(heads * per_head, inputs)
        settings.init_method(heads * per_head)(whole)
        partition = Partition(0, copies=copies.size)
        self.weight = nn.Parameter(partition.shard(whole, tp.rank, tp.size).clone())
        partition.mark(self.weight, tp.rank)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, B, inputs), partitioned as the input of a column-parallel layer -> all tokens (N, B, n)."""
        return F.linear(column_input(x, self.settings), replicated(self.weight, self.group))


def low_rank_update(
    settings: ModelSettings, target: str, inputs: int, outputs: int, parallel: str
) -> "LowRankUpdate | None":
    """The update of matrix `target`; None if it is not among the targets of settings.lora."""
    if settings.lora is None or target not in settings.lora.targets:
        return None
    return LowRankUpdate(settings, settings.lora, inputs, outputs, parallel)


def add_updates(
    parts: Sequence[Tensor],
    updates: Sequence[nn.Module | None],
    x: Tensor,
    reshape: Callable[[Tensor], Tensor] = lambda update: update,
) -> list[Tensor]:
    """The parts of a fused product of x plus their low-rank updates, reshaped by `reshape`."""
    return [
        part if update is None else part + reshape(update(x))
        for part, update in zip(parts, updates, strict=True)
    ]


class LowRankUpdate(nn.Module):
    """LoRA: alpha / rank B A x, initially 0, for a projection from `inputs` to `outputs` features.

    parallel: `column` or `row`, as the projection is partitioned over tensor ranks, which communicate only A x.
    """

    def __init__(self, settings: ModelSettings, lora: Lora, inputs: int, outputs: int, parallel: str):
        super().__init__()
        tp = settings.mesh.tp
        self.settings, self.parallel = settings, parallel
        self.shard_group = tp.group if settings.mesh.sequence_parallel else None
        self.scale = lora.alpha / lora.rank
        self.dropout = lora.dropout
        bound = 1 / math.sqrt(inputs)
        down = torch.empty(lora.rank, inputs)  # drawn whole, then partitioned
        settings.draw(down, lambda matrix: matrix.uniform_(-bound, bound))
        if parallel == "row":
            down = down.chunk(tp.size, 1)[tp.rank].clone()
        else:
            outputs //= tp.size
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(outputs, lora.rank))
        cut, dimension = (self.down, 1) if parallel == "row" else (self.up, 0)
        Partition(dimension).mark(cut, tp.rank)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, B, inputs) -> (N, B, outputs), partitioned as the projection's inputs and outputs are."""
        x = F.dropout(x, self.dropout, self.training and self.dropout > 0)
        if self.parallel == "column":
            small = column_input(F.linear(x, replicated(self.down, self.shard_group)), self.settings)
            return self.scale * F.linear(small, self.up)
        small = F.linear(x, self.down)
        if (tp := self.settings.mesh.tp).size > 1:
            small = _row_output(small, tp.group, self.settings.mesh.sequence_parallel)
        return self.scale * F.linear(small, replicated(self.up, self.shard_group))
