"""Attention heads over the tensor ranks, and parameters that all of them hold whole."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed import ProcessGroup

from megakernel.attention import ALL_HEADS, AttentionLayer, HeadShard
from megakernel.parallel.axis import Axis


def replicated(parameter: Tensor, group: ProcessGroup | None) -> Tensor:
    """`parameter`, whose gradient is the sum of what the processes of `group` compute from it.

    For what the heads of all tensor ranks share, and for norms and biases on sequence shards. With group None
    the gradient stays this process's own.
    """
    if group is None:
        return parameter
    return _SummedBackward.apply(parameter, group)


def total(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x` over the processes of `group`, on each of them, which all go on to use it.

    The gradient of a part is therefore the sum of the gradients of the total.
    """
    return _Total.apply(x, group)


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    # Of a copy: Megatron-core's own sum works in place, and loses its result where x is not contiguous.
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


class _SummedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None  # type: ignore[attr-defined]


class _Total(_SummedBackward):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return _sum(x, group)


def head_shard(tp: Axis) -> HeadShard:
    """The heads of every attention layer that this process holds: consecutive ones, equally many on each."""
    if tp.size == 1:
        return ALL_HEADS
    return HeadShard(tp.rank, tp.size, partial(replicated, group=tp.group))


def mark_head_parameters(layer: AttentionLayer) -> None:
    """Say of a layer's parameters and buffers which are cut between tensor ranks, in Megatron-core's way.

    Without the mark DeepSpeed takes a parameter for a copy and counts it on the first tensor rank only, and a
    checkpoint for another layout would hold the first rank's shard.
    """
    tensors = layer.state_dict(keep_vars=True)
    for name, dimension in layer.sharded_parameters().items():
        mark_cut(tensors[name], dimension)


def mark_cut(tensor: Tensor, dimension: int) -> None:
    """Note on a tensor, in Megatron-core's way, along which dimension tensor ranks share it."""
    for note, value in (
        ("tensor_model_parallel", True),
        ("partition_dim", dimension),
        ("partition_stride", 1),
    ):
        setattr(tensor, note, value)
