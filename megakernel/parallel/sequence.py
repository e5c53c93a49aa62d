"""`ContextParallelShard` over a context-parallel process group.

Kernel attention exchanges only states, whose size does not depend on the number of tokens.
"""

from typing import Literal

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor

from megakernel.attention.sequence import ContextParallelShard
from megakernel.ops.state import KernelState, PendingState
from megakernel.parallel.axis import Axis
from megakernel.parallel.exchange_method import ExchangeMethod, choose_method
from megakernel.parallel.progress import Progress
from megakernel.parallel.state_exchange import (
    AllGather,
    PendingPrefix,
    PointToPoint,
    Runner,
    ScanOrder,
    StateExchange,
)
from megakernel.parallel.tensor import all_reduce
from megakernel.parallel.traffic import Traffic


class PendingRotation:
    """A rotation in flight; its tensors must not be changed until `wait`."""

    def __init__(
        self,
        works: list[dist.Work],
        sent: tuple[Tensor, ...],
        received: tuple[Tensor, ...],
        traffic: Traffic,
    ):
        self._works = works
        self._traffic = traffic
        # Keep references: the transport reads and writes these until the wait.
        self._sent = sent
        self._received = received

    def wait(self) -> tuple[Tensor, ...]:
        """The left neighbor's tensors, once they have arrived and this rank's have been sent."""
        with self._traffic.waiting("keys"):
            for work in self._works:
                work.wait()
        received = self._received
        del self._works, self._sent, self._received
        return received


class GroupShard(ContextParallelShard):
    """Shard `rank` of `size` over the processes of one axis.

    All processes of the axis must call the same methods in the same order, and run the same backward.
    """

    def __init__(
        self,
        axis: Axis,
        background: Runner,
        state_exchange: Literal["auto"] | ExchangeMethod = "auto",
        progress: Progress | None = None,
        states: Axis | None = None,
        per_machine: int = 1,
    ):
        """background: runs point-to-point exchanges of states, one for all shards of a process.

        state_exchange: `parallel.state_exchange` of the configuration. progress: of this process. states: the same axis
        in a group of its own, in which states are exchanged: a communicator runs one exchange at a time. None: `axis`.
        per_machine: shards on each machine, the same on all ranks.
        """
        self._states = states or axis
        self._method = state_exchange
        self._per_machine = per_machine
        self._background = background
        self.rank = axis.rank
        self.size = axis.size
        self._group = axis.group
        self.traffic = Traffic(progress)
        """Bytes that this rank has sent to the other shards."""

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The left neighbor's last `count` tokens, zeros on rank 0: (..., N, d) -> (..., count, d)."""
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
        self.traffic.add("window", sent)
        if received.requires_grad:
            # Backward sends zeros of the same size if there is no gradient.
            returned = torch.empty_like(received, device="meta")
            received.register_hook(lambda grad: self.traffic.add("window", returned))
        # Concatenated even if all is missing, so that rank 0 takes part in the neighbors' backward.
        missing = last.new_zeros(count - len(received), *last.shape[1:])
        return torch.cat([missing, received]).movedim(0, -2)

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """See `ContextParallelShard.start_prefix`."""
        return PendingPrefix(self._exchange(state, ScanOrder(self._states)), state, carries)

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """See `ContextParallelShard.start_suffix`."""
        return PendingPrefix(self._exchange(state, ScanOrder(self._states, backwards=True)), state, carries)

    def _exchange(self, state: KernelState, order: ScanOrder) -> StateExchange:
        method = self._method
        if method == "auto":
            size = state.sums.numel() * state.sums.element_size()
            method = choose_method(self.size, size, self._per_machine)
        if method == "gather":
            return AllGather(order, self.traffic)
        return PointToPoint(order, self.traffic, self._background)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `ContextParallelShard.all_reduce`."""
        with self.traffic.waiting("sums"):
            result = all_reduce(x, self._group)
        self.traffic.add_both_ways("sums", x, result, times=2 * (self.size - 1) / self.size)
        return result

    def all_tokens(self, x: Tensor) -> Tensor:
        """See `ContextParallelShard.all_tokens`."""
        tokens_first = x.movedim(-2, 0).contiguous()
        with self.traffic.waiting("tokens"):
            result = gather_from_sequence_parallel_region(tokens_first, group=self._group)
        self.traffic.add_both_ways("tokens", x, result, times=self.size - 1)
        return result.movedim(0, -2)

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """See `ContextParallelShard.tokens_to_heads`."""
        batch, heads, tokens, dim = x.shape
        assert heads % self.size == 0, f"{heads} heads over {self.size} context ranks"
        by_receiver = x.unflatten(1, (self.size, heads // self.size)).movedim(1, 0)
        by_sender = self._all_to_all(by_receiver)
        return by_sender.movedim(0, 2).reshape(batch, heads // self.size, self.size * tokens, dim)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        by_receiver = x.unflatten(2, (self.size, -1)).movedim(2, 0)
        return self._all_to_all(by_receiver).movedim(0, 1).flatten(1, 2)

    def _all_to_all(self, by_receiver: Tensor) -> Tensor:
        with self.traffic.waiting("heads"):
            by_sender = all_to_all(self._group, by_receiver)
        self.traffic.add_both_ways("heads", by_receiver, by_sender, times=(self.size - 1) / self.size)
        return by_sender

    def start_rotation(self, tensors: tuple[Tensor, ...]) -> PendingRotation:
        """Start sending `tensors` to the right neighbor and receiving the left neighbor's.

        Only neighbors communicate, so each network link carries one message at a time. All processes pass tensors of
        the same shapes, dtypes and device, so no metadata is sent.
        """
        sent = tuple(x.detach().contiguous() for x in tensors)
        received = tuple(torch.empty_like(x) for x in sent)
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        operations = []
        # Tags separate the messages of one rotation from each other and from other exchanges, which have tag 0. gloo
        # preserves the order of messages with one tag, NCCL of all messages between two processes.
        for tag, (message, buffer) in enumerate(zip(sent, received), start=1):
            operations.append(dist.P2POp(dist.isend, message, group=self._group, tag=tag, group_peer=right))
            operations.append(dist.P2POp(dist.irecv, buffer, group=self._group, tag=tag, group_peer=left))
            self.traffic.add("keys", message)
        return PendingRotation(dist.batch_isend_irecv(operations), sent, received, self.traffic)
