"""One axis of the mesh as seen by one process, and the mesh of a single process."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup

from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
from megakernel.config.parallel import SoftmaxExchange


@dataclass(frozen=True)
class Line:
    """The processes that differ from this one only in one coordinate, in rank order."""

    rank: int
    """Position of this process among them."""

    ranks: tuple[int, ...]
    """Their world ranks."""

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.ranks)


@dataclass(frozen=True)
class Axis(Line):
    """A line of processes that communicate, or of those that differ in several coordinates."""

    group: ProcessGroup
    """Their process group."""

    @classmethod
    def of(cls, group: ProcessGroup) -> "Axis":
        """The axis of a group this process belongs to."""
        return cls(dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), group)


class OneProcess:
    """The mesh of a model in another program. It initializes no process group, so the program may do so itself."""

    # A class attribute: deepcopy of a model must not copy the group, which cannot be copied.
    tp = Axis(0, (0,), ProcessGroup(HashStore(), 0, 1))
    sequence_parallel = False
    softmax_exchange: SoftmaxExchange = "auto"

    def copies(self, key_heads: int) -> None:
        """No other rank holds key heads."""

    def new_cp_shard(self) -> ContextParallelShard:
        """The whole sequence."""
        return WHOLE_SEQUENCE
