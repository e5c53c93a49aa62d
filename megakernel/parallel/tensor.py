"""Attention heads over the tensor ranks, and parameters that all of them hold whole."""

from functools import partial

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megakernel.attention import AttentionLayer, HeadShard
from megakernel.parallel.axis import Axis


def replicated(parameter: Tensor, group: ProcessGroup | None) -> Tensor:
    """`parameter`, whose gradient is the sum of what the processes of `group` compute from it.

    For what the heads of all tensor ranks share, and for norms and biases on sequence shards. With group None
    the gradient stays this process's own.
    """
    if group is None:
        return parameter
    return copy_to_tensor_model_parallel_region(parameter, group=group)


def head_shard(tp: Axis) -> HeadShard:
    """The heads of every attention layer that this process holds: consecutive ones, equally many on each."""
    return HeadShard(tp.rank, tp.size, partial(replicated, group=tp.group))


def mark_head_parameters(layer: AttentionLayer) -> None:
    """Say of a layer's parameters and buffers which are cut between tensor ranks, in Megatron-core's way.

    Without the mark DeepSpeed takes a parameter for a copy and counts it on the first tensor rank only, and a
    checkpoint for another layout would hold the first rank's piece.
    """
    tensors = layer.state_dict(keep_vars=True)
    for name, dimension in layer.sharded_parameters().items():
        set_tensor_model_parallel_attributes(tensors[name], True, dimension, 1)
