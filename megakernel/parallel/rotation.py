"""Rotation over the context-parallel group: every process hands tensors to its right neighbour, the last to the first.

Sends and receives between neighbours, so that over a network each link carries one message at a time.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megakernel.parallel.traffic import Traffic


class PendingRotation:
    """A rotation under way. What is sent and what is received must be left alone until `wait`."""

    def __init__(
        self,
        works: list[dist.Work],
        sent: tuple[Tensor, ...],
        received: tuple[Tensor, ...],
        traffic: Traffic,
    ):
        self._works = works
        self._traffic = traffic
        # The transport reads these until the wait, whoever else has forgotten them.
        self._sent = sent
        self._received = received

    def wait(self) -> tuple[Tensor, ...]:
        """The left neighbour's tensors, once they are here and mine have left."""
        with self._traffic.waiting("keys"):
            for work in self._works:
                work.wait()
        received = self._received
        del self._works, self._sent, self._received
        return received


def start_rotation(
    tensors: tuple[Tensor, ...], group: dist.ProcessGroup, traffic: Traffic
) -> PendingRotation:
    """Begin to send `tensors` to the next process of `group` and to receive as many from the one before.

    Every process of the group calls this in the same order, with tensors of the same shapes, dtypes and device, so
    nothing about them needs to be sent. Each process sends the bytes of its `tensors`, which `traffic` counts, and
    receives as many. Not differentiable.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = tuple(x.detach().contiguous() for x in tensors)
    received = tuple(torch.empty_like(x) for x in sent)
    operations = []
    # Tags tell the messages of one rotation apart, and from those of other exchanges, which have 0. gloo keeps the
    # order of one tag, NCCL that of all between two processes.
    for tag, (mine, theirs) in enumerate(zip(sent, received), start=1):
        operations.append(dist.P2POp(dist.isend, mine, group=group, tag=tag, group_peer=(rank + 1) % size))
        operations.append(dist.P2POp(dist.irecv, theirs, group=group, tag=tag, group_peer=(rank - 1) % size))
        traffic.sends("keys", mine)
    return PendingRotation(dist.batch_isend_irecv(operations), sent, received, traffic)
