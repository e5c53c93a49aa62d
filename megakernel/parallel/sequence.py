"""A shard of the sequence over the context-parallel group: what `attention` asks of its neighbours.

The kernel state is all that every process sends to every other, and its size does not depend on the tokens.
"""

from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from megakernel.attention.sequence import ContextParallelShard
from megakernel.ops.state import KernelState, PendingState
from megakernel.parallel.axis import Axis
from megakernel.parallel.exchange_way import Way, way
from megakernel.parallel.progress import Progress
from megakernel.parallel.state_exchange import (
    AllGather,
    Background,
    PendingPrefix,
    Place,
    PointToPoint,
    Runner,
    StateExchange,
)
from megakernel.parallel.tensor import total
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
        """The left neighbour's tensors, once they are here and this rank's have left."""
        with self._traffic.waiting("keys"):
            for work in self._works:
                work.wait()
        received = self._received
        del self._works, self._sent, self._received
        return received


class GroupShard(ContextParallelShard):
    """Shard `rank` of `size`, the others being held by the processes of one axis.

    Every process of the axis must ask the same questions in the same order, and must run the same backward.
    """

    def __init__(
        self,
        axis: Axis,
        state_exchange: Literal["auto"] | Way = "auto",
        progress: Progress | None = None,
        background: Runner | None = None,
    ):
        """state_exchange: `parallel.state_exchange` of the configuration; progress: of this process.

        background: where chains of states run; None: while this rank computes.
        """
        self._axis = axis
        self._way = state_exchange
        self._background = background
        self.rank = axis.rank
        self.size = axis.size
        self._group = axis.group
        self.traffic = Traffic(progress)
        """Bytes sent from here to the other shards."""

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The left neighbour's last `count` tokens, zeros on rank 0: (..., N, d) -> (..., count, d)."""
        assert count <= x.shape[-2], (count, x.shape)
        to_right, from_left = [0] * self.size, [0] * self.size
        if self.rank < self.size - 1:
            to_right[self.rank + 1] = count
        if self.rank > 0:
            from_left[self.rank - 1] = count
        last = x[..., x.shape[-2] - count :, :].movedim(-2, 0)
        sent = last[: sum(to_right)]
        with self.traffic.waiting("window"):
            received = all_to_all(self._group, sent, from_left, to_right)
        self.traffic.sends("window", sent)
        if received.requires_grad:
            # Where nobody gave a gradient, zeros of the same size travel back.
            back = torch.empty_like(received, device="meta")
            received.register_hook(lambda grad: self.traffic.sends("window", back))
        # Concatenated rather than replaced, so that rank 0 takes part in the neighbours' backward too.
        missing = last.new_zeros(count - len(received), *last.shape[1:])
        return torch.cat([missing, received]).movedim(0, -2)

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Send `state` towards the later shards: see `ContextParallelShard.start_prefix`."""
        return PendingPrefix(self._exchange(state, Place(self._axis)), state, carries)

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Send `state` towards the earlier shards."""
        return PendingPrefix(self._exchange(state, Place(self._axis, backwards=True)), state, carries)

    def _exchange(self, state: KernelState, place: Place) -> StateExchange:
        chosen = self._way
        if chosen == "auto":
            chosen = way(self.size, state.sums.numel() * state.sums.element_size())
        if chosen == "gather":
            return AllGather(place, self.traffic)
        if self._background is None:
            self._background = Background(state.sums.device)
        return PointToPoint(place, self.traffic, self._background)

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the shards, on each of them."""
        with self.traffic.waiting("sums"):
            result = total(x, self._group)
        self.traffic.sends_and_returns("sums", x, result, times=2 * (self.size - 1) / self.size)
        return result

    def all_tokens(self, x: Tensor) -> Tensor:
        """(..., n, d) of this rank -> (..., size * n, d) of all shards in order."""
        tokens_first = x.movedim(-2, 0).contiguous()
        with self.traffic.waiting("tokens"):
            result = gather_from_sequence_parallel_region(tokens_first, group=self._group)
        self.traffic.sends_and_returns("tokens", x, result, times=self.size - 1)
        return result.movedim(0, -2)

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, d) with my tokens of all heads -> (B, H / size, N * size, d), all tokens of my heads."""
        batch, heads, tokens, dim = x.shape
        assert heads % self.size == 0, f"{heads} heads over {self.size} context ranks"
        by_receiver = x.unflatten(1, (self.size, heads // self.size)).movedim(1, 0)
        by_sender = self._trade(by_receiver)
        return by_sender.movedim(0, 2).reshape(batch, heads // self.size, self.size * tokens, dim)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        by_receiver = x.unflatten(2, (self.size, -1)).movedim(2, 0)
        return self._trade(by_receiver).movedim(0, 1).flatten(1, 2)

    def _trade(self, by_receiver: Tensor) -> Tensor:
        with self.traffic.waiting("heads"):
            by_sender = all_to_all(self._group, by_receiver)
        self.traffic.sends_and_returns("heads", by_receiver, by_sender, times=(self.size - 1) / self.size)
        return by_sender

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingRotation:
        """Begin to send `tensors` to the right neighbour and to receive the left one's.

        Only neighbours send and receive, so that over a network each link carries one message at a time. Every process
        asks with tensors of the same shapes, dtypes and device, so nothing about them needs to be sent.
        """
        sent = tuple(x.detach().contiguous() for x in tensors)
        received = tuple(torch.empty_like(x) for x in sent)
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = []
        # Tags tell the messages of one rotation apart, and from those of other exchanges, which have 0. gloo keeps the
        # order of one tag, NCCL that of all between two processes.
        for tag, (own, buffer) in enumerate(zip(sent, received), start=1):
            operations.append(dist.P2POp(dist.isend, own, group=self._group, tag=tag, group_peer=right))
            operations.append(dist.P2POp(dist.irecv, buffer, group=self._group, tag=tag, group_peer=left))
            self.traffic.sends("keys", own)
        return PendingRotation(dist.batch_isend_irecv(operations), sent, received, self.traffic)
