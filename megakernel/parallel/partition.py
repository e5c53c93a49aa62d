"""How a tensor is partitioned over tensor ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """Tensor-parallel partition of a tensor, as Megatron-core's layers and ours set it as attributes of parameters.

    With fewer key heads than tensor ranks, neighbouring ranks hold equal copies of what a key head owns (`copies`), or
    share the rows that project to its queries, keys and values (`parts`).
    """

    dimension: int | None
    """The partitioned dimension; None: every rank has the whole tensor."""

    stride: int = 1
    """Number of equal parts along the dimension that are each partitioned: 2 for SwiGLU's fused gate and up."""

    copies: int = 1
    """Number of neighbouring ranks that hold the same shard."""

    parts: tuple[int, ...] = ()
    """Sizes along the dimension of the parts of a group of rows, of which each rank of the group has an equal share.
    Groups follow one another. Empty: no groups."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Partition":
        """The partition that is set on a parameter or buffer."""
        if (own := getattr(tensor, "tensor_partition", None)) is not None:
            return own
        if not getattr(tensor, "tensor_model_parallel", False):
            return cls(None)
        return cls(tensor.partition_dim, tensor.partition_stride)  # type: ignore[attr-defined]

    def mark(self, tensor: Tensor, rank: int) -> None:
        """Set the partition on the tensor of tensor rank `rank`, with Megatron-core's attributes.

        Of equal copies only the first counts as tensor-parallel: Megatron-core and DeepSpeed count every such tensor in
        the gradient norm, and others on tensor rank 0 alone.
        """
        attributes = {
            "tensor_model_parallel": rank % self.copies == 0,
            "partition_dim": self.dimension,
            "partition_stride": self.stride,
            "tensor_partition": self,
        }
        for name, value in attributes.items():
            setattr(tensor, name, value)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all tensor ranks, in order, into the whole tensor."""
        if self.dimension is None:
            return shards[0]
        shards = shards[:: self.copies]
        if not self.parts:
            return self._join([shard.chunk(self.stride, self.dimension) for shard in shards])
        count = sum(self.parts) // shards[0].shape[self.dimension]
        shares = [shard.split([size // count for size in self.parts], self.dimension) for shard in shards]
        groups = [self._join(shares[first : first + count]) for first in range(0, len(shares), count)]
        return torch.cat(groups, self.dimension)

    def _join(self, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        """Join the parts of the whole tensor, of which `shares` has each rank's shares."""
        assert self.dimension is not None
        return torch.cat([share for part in zip(*shares) for share in part], self.dimension)

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """The shard of tensor rank `rank` of `size`."""
        if self.dimension is None:
            return whole
        rank, size = rank // self.copies, size // self.copies
        if self.parts:
            groups = whole.split(sum(self.parts), self.dimension)
            size //= len(groups)  # ranks that share a group
            group, rank = divmod(rank, size)
            parts = groups[group].split(self.parts, self.dimension)
        else:
            parts = whole.chunk(self.stride, self.dimension)
        return torch.cat([part.chunk(size, self.dimension)[rank] for part in parts], self.dimension)

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of the whole tensor of `size` shards of `shape`."""
        return tuple(n * size // self.copies if i == self.dimension else n for i, n in enumerate(shape))
