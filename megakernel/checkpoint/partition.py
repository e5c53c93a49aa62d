"""How tensor ranks share one tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Partition:
    """What Megatron-core's layers note on their parameters, and ours on what belongs to heads."""

    dimension: int | None
    """Dimension that is cut; None: every rank holds the whole."""

    stride: int = 1
    """Equal parts along the dimension, each of them cut: 2 for the gate and up rows of a SwiGLU projection."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Partition":
        """The cut that the layer which made `tensor` has noted on it."""
        if not getattr(tensor, "tensor_model_parallel", False):
            return cls(None)
        return cls(tensor.partition_dim, tensor.partition_stride)  # type: ignore[attr-defined]

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the shards of all tensor ranks, in order."""
        if self.dimension is None:
            return shards[0]
        parts = zip(*(shard.chunk(self.stride, self.dimension) for shard in shards))
        return torch.cat([shard for part in parts for shard in part], self.dimension)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """What tensor rank `rank` of `size` holds of the whole tensor."""
        if self.dimension is None:
            return whole
        parts = whole.chunk(self.stride, self.dimension)
        return torch.cat([part.chunk(size, self.dimension)[rank] for part in parts], self.dimension)

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of the tensor that `size` shards of `shape` make."""
        return tuple(n * size if i == self.dimension else n for i, n in enumerate(shape))


def partitions(model: nn.Module) -> dict[str, Partition]:
    """Name -> cut of every parameter and buffer that a checkpoint holds.

    For a model that DeepSpeed has not yet prepared: casting it replaces the buffers, and with them the notes.
    """
    tensors = model.state_dict(keep_vars=True)  # Megatron-core's layers add entries that are no tensors
    return {name: Partition.of(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
