"""Tensor parallelism of attention heads, and parameters that all tensor ranks, or some of them, replicate."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard
from megakernel.parallel.axis import Axis
from megakernel.parallel.partition import Partition


def replicated(parameter: Tensor, group: ProcessGroup | None) -> Tensor:
    """`parameter` itself; in backward its gradient is all-reduced over `group`.

    For parameters that the heads of all tensor ranks share, those of a key head that several tensor ranks hold, and
    norms and biases under sequence parallelism. With group None the gradient is not reduced.
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


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather the last dimension over `group`; every process uses all of it, so backward reduce-scatters."""
    from megatron.core import tensor_parallel

    return tensor_parallel.all_gather_last_dim_from_tensor_parallel_region(x, group=group)


def head_shard(tp: Axis, copies: Axis | None = None) -> HeadShard:
    """The shard of an attention layer's heads on this tensor rank. copies: `Mesh.copies`."""
    if tp.size == 1:
        return ALL_HEADS
    shared = partial(replicated, group=tp.group)
    copied = None if copies is None else partial(replicated, group=copies.group)
    return HeadShard(tp.rank, tp.size, shared, copied)


def mark_head_parameters(layer: AttentionLayer, copies: int = 1) -> None:
    """Mark a layer's parameters and buffers that are partitioned over tensor ranks, with Megatron-core's attributes.

    DeepSpeed takes unmarked parameters for replicas: it would count them on tensor rank 0 only, and checkpoints for
    another layout would hold rank 0's shard. copies: tensor ranks that hold the same key head.
    """
    tensors = layer.state_dict(keep_vars=True)
    for name, dimension in layer.sharded_parameters().items():
        of_query_heads = name in layer.per_query_head
        Partition(dimension, copies=1 if of_query_heads else copies).mark(tensors[name], layer.heads.rank)
