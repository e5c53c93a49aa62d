"""One axis of the mesh, as one process sees it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Axis:
    """The processes that differ from this one in the named coordinates only, in rank order."""

    group: ProcessGroup
    """Their process group."""

    rank: int
    """This process's place in the group."""

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
