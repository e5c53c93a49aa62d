"""The exclusive prefix scan of kernel states over context-parallel shards, asynchronous in forward and backward.

There are two implementations. `AllGather` gathers the states of all shards, and each shard sums the earlier ones.
`PointToPoint` passes sums along: each shard adds its state to the incoming sum and sends the result to its neighbor,
in parts that are pipelined over the shards. `exchange_method` chooses the faster one.

A shard maps an incoming state E to f E + S. f is 1, or 0 if a document starts in the shard, or a decay factor per head.
(f, S) followed by (g, T) is (g f, g S + T), which is associative, so shards may be combined in any grouping. The
gradient of f is the product of E and the gradient of S in both implementations.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.state import EMPTY, KernelState
from megakernel.parallel.axis import Axis
from megakernel.parallel.exchange_method import ring_parts
from megakernel.parallel.traffic import Traffic

MAX_LOG = 80.0
"""Exponents up to this do not overflow float32."""


class ScanOrder(NamedTuple):
    """The position of a process in the scan order of the shards."""

    axis: Axis
    backwards: bool = False
    """Whether the scan goes from the last shard to the first."""

    @property
    def rank(self) -> int:
        """Shards before this one."""
        return self.axis.size - 1 - self.axis.rank if self.backwards else self.axis.rank

    def neighbor(self, distance: int) -> int | None:
        """World rank of the shard `distance` positions later in scan order; None beyond the ends."""
        index = self.axis.rank + (-distance if self.backwards else distance)
        return self.axis.ranks[index] if 0 <= index < self.axis.size else None


class StateExchange(Protocol):
    """One prefix scan and its backward; local work runs between `start` and `finish`."""

    incoming: tuple[Tensor, Tensor]
    """The result of `finish`."""

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """Send this shard's state. carries: the factor f of the incoming state, (B,) bool or (B, H)."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """Sums and log scale of the incoming state."""
        ...

    def start_backward(self, grad: Tensor) -> None:
        """Send the gradient of the incoming sums."""
        ...

    def finish_backward(self) -> Tensor:
        """The gradient of the sums that this shard sent."""
        ...


class PendingPrefix:
    """A prefix scan in flight (`megakernel.ops.state.PendingState`)."""

    def __init__(self, exchange: StateExchange, state: KernelState, carries: Tensor):
        self._exchange = exchange
        self._ticket = _Start.apply(state.sums, state.log_scale, carries, exchange)

    def wait(self) -> KernelState:
        """The incoming state of this shard."""
        sums, log_scale = _Wait.apply(self._ticket, self._exchange)
        return KernelState(sums, log_scale)


class AllGather:
    """An all-gather in forward, and one in backward.

    The incoming sums of shard r are sum_s weights[r, s] sums_s; the gradient of sums_s is the same sum over r.
    """

    incoming: tuple[Tensor, Tensor]

    def __init__(self, order: ScanOrder, traffic: Traffic):
        self.rank, self.size = order.rank, order.axis.size
        self.group = order.axis.group
        self.backwards = order.backwards
        self.traffic = traffic

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """Gather one message per shard: its state, log scales and factor."""
        self.shape, self.scale_dtype, self.carries_shape = sums.shape, log_scale.dtype, carries.shape
        self._gather(torch.cat([x.to(sums.dtype).flatten() for x in (sums, log_scale, carries)]))

    def finish(self) -> tuple[Tensor, Tensor]:
        """See StateExchange."""
        batch, heads = self.shape[:2]
        sizes = [self.shape.numel(), batch * heads, self.carries_shape.numel()]
        sums, log_scales, carries = self._wait().split(sizes, dim=1)
        scales = log_scales.view(self.size, batch, heads)
        incoming_log, weights = prefix_weights(scales, carries.view(self.size, *self.carries_shape))
        self.weights_in_later = weights[self.rank + 1 :, self.rank]
        earlier = sums.view(self.size, *self.shape)[: self.rank]
        return _weighted_sum(weights[self.rank], earlier), incoming_log[self.rank].to(self.scale_dtype)

    def start_backward(self, grad: Tensor) -> None:
        """See StateExchange."""
        self._gather(grad.flatten())

    def finish_backward(self) -> Tensor:
        """See StateExchange."""
        grads = self._wait().view(self.size, *self.shape)
        return _weighted_sum(self.weights_in_later, grads[self.rank + 1 :])

    def _gather(self, message: Tensor) -> None:
        # Keep the message until the wait: the collective reads it on its own stream.
        self._message = message
        self._gathered = message.new_empty(self.size * len(message))
        self._work = dist.all_gather_into_tensor(self._gathered, message, group=self.group, async_op=True)
        self.traffic.add("state", message, times=self.size - 1)

    def _wait(self) -> Tensor:
        # On a GPU, is_completed() says nothing: the host runs ahead of the device. Never count those as late.
        with self.traffic.waiting("state", self._message.is_cuda or self._work.is_completed()):
            self._work.wait()
        gathered = self._gathered.view(self.size, -1)
        del self._work, self._message, self._gathered
        return gathered.flip(0) if self.backwards else gathered


class PointToPoint:
    """Point-to-point passing between neighbors: forward from the first shard on, backward from the last.

    A shard sends E' = a E + b S, with a and b the scales of the incoming and its own sums. In backward it receives G',
    the gradient of E'; b G' is the gradient of S, and G + a G' goes to the previous shard, G the gradient of E.
    """

    incoming: tuple[Tensor, Tensor]

    def __init__(self, order: ScanOrder, traffic: Traffic, background: "Runner"):
        self.order = order
        self.traffic = traffic
        self.background = background

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """See StateExchange."""
        self._run = self.background.run(lambda: self._forward(sums.contiguous(), log_scale, carries))

    def start_backward(self, grad: Tensor) -> None:
        """See StateExchange."""
        self._run = self.background.run(lambda: self._backward(grad.contiguous()))

    def finish(self) -> Any:
        """See StateExchange; the result of the forward or backward pass in flight."""
        with self.traffic.waiting("state", self._run.done()):
            result = self._run.result()
        del self._run
        return result

    finish_backward = finish

    def _forward(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> tuple[Tensor, Tensor]:
        incoming_log = torch.full_like(log_scale, EMPTY, memory_format=torch.contiguous_format)
        self._communicate(self._message(dist.irecv, incoming_log, -1))
        factors = per_head(carries).to(log_scale.dtype)
        carries = factors != 0
        kept_log = torch.where(carries, incoming_log + torch.where(carries, factors, 1.0).log(), EMPTY)
        outgoing_log = torch.maximum(kept_log, log_scale)
        self._communicate(self._message(dist.isend, outgoing_log.contiguous(), 1))
        keep = torch.where(carries, torch.exp(kept_log - outgoing_log), 0.0)
        self.keep, self.add = (
            x[..., None, None].to(sums.dtype) for x in (keep, torch.exp(log_scale - outgoing_log))
        )
        self.parts = ring_parts(self.order.axis.size, sums.numel() * sums.element_size())
        incoming = torch.zeros_like(sums)
        self._pass_on((own * self.add for own in self._split(sums)), incoming, -1)
        return incoming, incoming_log

    def _backward(self, grad: Tensor) -> Tensor:
        outgoing_grad = torch.zeros_like(grad)
        self._pass_on(self._split(grad), outgoing_grad, 1)
        return outgoing_grad * self.add

    def _pass_on(self, own: Iterable[Tensor], total: Tensor, source: int) -> None:
        """Receive `total` from the neighbor at `source`; send each part times `keep`, plus `own`, to the other.

        A part is sent in one batch with the receipt of the next: NCCL runs single messages of a group in turn.
        """
        parts = self._split(total)
        received = parts[0].contiguous()
        self._communicate(self._message(dist.irecv, received, source))
        for index, mine in enumerate(own):
            parts[index].copy_(received)
            outgoing = (mine + parts[index] * self.keep).contiguous()
            messages = [self._message(dist.isend, outgoing, -source)]
            for following in parts[index + 1 : index + 2]:
                received = following.contiguous()
                messages.append(self._message(dist.irecv, received, source))
            self._communicate(*messages)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of consecutive ranges of features."""
        return x.tensor_split(self.parts, dim=2)

    def _message(self, operation: Callable[..., Any], x: Tensor, distance: int) -> dist.P2POp | None:
        """A message of contiguous `x` from or to the neighbor at `distance`; None if there is none."""
        neighbor = self.order.neighbor(distance)
        if neighbor is None:
            return None
        if operation is dist.isend:
            self.traffic.add("state", x)
        return dist.P2POp(operation, x, neighbor, self.order.axis.group)

    def _communicate(self, *messages: dist.P2POp | None) -> None:
        """Send and receive at the same time."""
        if batch := [message for message in messages if message is not None]:
            for work in dist.batch_isend_irecv(batch):
                work.wait()


class _PendingResult(Protocol):
    def done(self) -> bool: ...

    def result(self) -> Any: ...


class Runner(Protocol):
    """Runs point-to-point exchanges."""

    def run(self, exchange: Callable[[], Any]) -> _PendingResult:
        """Start an exchange."""
        ...


class Background:
    """Runs exchanges concurrently with local work: in a thread on CPU, on its own CUDA stream on a GPU.

    They run one after the other in the order they were started, which is the same on all shards.
    """

    def __init__(self, device: torch.device):
        self._threads = ThreadPoolExecutor(1, "state exchange") if device.type == "cpu" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, exchange: Callable[[], Any]) -> _PendingResult:
        """Start an exchange."""
        if self._threads is not None:
            future: Future[Any] = self._threads.submit(exchange)
            return future
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return _StreamResult(exchange, exchange(), self._stream)


class _StreamResult:
    """The result of work queued on a CUDA stream.

    It holds the exchange and with it the tensors that the exchange reads. Freed while the stream waits for a neighbor,
    their memory would go to the next work of the current stream.
    """

    def __init__(self, exchange: Callable[[], Any], value: Any, stream: torch.cuda.Stream):
        self._exchange, self._value, self._stream = exchange, value, stream

    def done(self) -> bool:
        """Always True: the host runs ahead of the device and does not know."""
        return True

    def result(self) -> Any:
        """The value, safe to use in later work on the current stream."""
        torch.cuda.current_stream().wait_stream(self._stream)
        for x in self._value if isinstance(self._value, tuple) else (self._value,):
            x.record_stream(torch.cuda.current_stream())
        return self._value


def per_head(carries: Tensor) -> Tensor:
    """Factors (B, H or 1) from (B,) bool or (B, H)."""
    return carries if carries.dim() == 2 else carries[..., None]


def prefix_weights(log_scales: Tensor, carries: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of each shard's sums in the incoming sums of each other shard.

    log_scales: (P, B, H). carries: (P, B) or (P, B, H), the factor of each shard's incoming state. Returns the log
    scale of each shard's incoming state (P, B, H), and weights (P, P, B, H): [r, s] of the sums of s in those of r.
    """
    ranks = torch.arange(len(carries), device=carries.device)
    factors = carries if carries.dim() == 3 else carries[..., None]
    reset = factors == 0
    resets, logs = reset.long().cumsum(0), torch.where(reset, 1.0, factors).log().cumsum(0)
    resets_before = resets - reset.long()
    logs_before = torch.cat([torch.zeros_like(logs[:1]), logs[:-1]])
    # s reaches r if no shard between them resets, that is, if there are as many resets before r as up to s.
    earlier = (ranks[None, :] < ranks[:, None])[..., None, None]
    reaches = earlier & (resets_before[:, None] == resets[None, :])
    scales = log_scales[None] + (logs_before[:, None] - logs[None])
    incoming_log = torch.where(reaches, scales, EMPTY).amax(1)
    return incoming_log, torch.where(reaches, torch.exp(scales - incoming_log[:, None]), 0.0)


def _weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """sum_s weights[s] states[s]: (S, B, H), (S, B, H, F, D) -> (B, H, F, D)."""
    # A loop fixes the order of the sum, and elementwise products are not rounded as in TF32 matrix products.
    total = states.new_zeros(states.shape[1:])
    for weight, state in zip(weights, states):
        total.addcmul_(state, weight[..., None, None])
    return total


class _Start(torch.autograd.Function):
    """Starts the exchange; its backward finishes the backward exchange."""

    @staticmethod
    def forward(
        ctx: Any, sums: Tensor, log_scale: Tensor, carries: Tensor, exchange: StateExchange
    ) -> Tensor:
        ctx.exchange, ctx.log_scale = exchange, log_scale
        exchange.start(sums, log_scale, carries)
        return sums.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket_grad: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        dsums, dcarries = ctx.exchange.finish_backward(), None
        if ctx.needs_input_grad[2]:
            sums, log_scale = ctx.exchange.incoming
            # Clamped: where this would overflow, the shard adds next to nothing and the gradient is 0 anyway.
            scale = torch.exp((log_scale - ctx.log_scale).clamp(max=MAX_LOG))
            dcarries = (dsums * sums).sum((-1, -2)) * scale
        return dsums, None, dcarries, None


class _Wait(torch.autograd.Function):
    """Finishes the exchange; its backward starts the backward exchange."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: StateExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        sums, log_scale = exchange.finish()
        # Detached: the output holds this function, which holds the exchange; such a circle is never freed.
        exchange.incoming = sums.detach(), log_scale
        ctx.mark_non_differentiable(log_scale)
        return sums, log_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums_grad: Tensor, scale_grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start_backward(sums_grad)
        return sums_grad.new_zeros(()), None
