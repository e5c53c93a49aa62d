"""One axis of the mesh as seen by one process, and the mesh of a single process."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup

from megakernel.attention.sequence import WHOLE_SEQUENCE, ContextParallelShard
from megakernel.config.parallel import SoftmaxExchange


@dataclass(frozen=True)
class Axis:
    """The processes that differ from this one only in the axis's coordinates, in rank order."""

    group: ProcessGroup
    """Their process group."""

    rank: int
    """Rank of this process in the group."""

    ranks: tuple[int, ...]
    """World ranks of the group."""

    @classmethod
    def of(cls, group: ProcessGroup) -> "Axis":
        """The axis of a group this process belongs to."""
        return cls(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))

    @property
    def size(self) -> int:
        """Processes in the group."""
        return len(self.ranks)


class OneProcess:
    """The mesh of a model in another program. It initializes no process group, so the program may do so itself."""

    # A class attribute: deepcopy of a model must not copy the group, which cannot be copied.
    tp = Axis(ProcessGroup(HashStore(), 0, 1), 0, (0,))
    sequence_parallel = False
    softmax_exchange: SoftmaxExchange = "auto"

    def new_cp_shard(self) -> ContextParallelShard:
        """The whole sequence."""
        return WHOLE_SEQUENCE
