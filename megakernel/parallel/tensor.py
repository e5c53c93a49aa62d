"""Tensor parallelism of attention heads, and parameters that all tensor ranks replicate."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard
from megakernel.parallel.axis import Axis


def replicated(parameter: Tensor, group: ProcessGroup | None) -> Tensor:
    """`parameter` itself; in backward its gradient is all-reduced over `group`.

    For parameters that the heads of all tensor ranks share, and for norms and biases under sequence parallelism. With
    group None the gradient is not reduced.
    """
    if group is None:
        return parameter
    return _AllReduceGradient.apply(parameter, group)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce `x` over `group`; every process uses the sum, so backward all-reduces its gradient too."""
    return _AllReduce.apply(x, group)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    # Not Megatron-core's, which works in place and loses the result if x is not contiguous.
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None  # type: ignore[attr-defined]


class _AllReduce(_AllReduceGradient):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _sum(x, group)


def head_shard(tp: Axis) -> HeadShard:
    """The shard of every attention layer's heads on this tensor rank."""
    if tp.size == 1:
        return ALL_HEADS
    return HeadShard(tp.rank, tp.size, partial(replicated, group=tp.group))


def mark_head_parameters(layer: AttentionLayer) -> None:
    """Mark a layer's parameters and buffers that are partitioned over tensor ranks, with Megatron-core's attributes.

    DeepSpeed takes unmarked parameters for replicas: it would count them on tensor rank 0 only, and checkpoints for
    another layout would hold rank 0's shard.
    """
    tensors = layer.state_dict(keep_vars=True)
    for name, dimension in layer.sharded_parameters().items():
        mark_partitioned(tensors[name], dimension)


def mark_partitioned(tensor: Tensor, dimension: int) -> None:
    """Set Megatron-core's attributes of a tensor that is partitioned over tensor ranks along `dimension`."""
    attributes = {"tensor_model_parallel": True, "partition_dim": dimension, "partition_stride": 1}
    for name, value in attributes.items():
        setattr(tensor, name, value)
