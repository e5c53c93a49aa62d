"""The exclusive prefix of kernel states over the shards of a sequence, asynchronous both ways.

Two ways to send the same numbers. `AllGather`: every shard's state goes to all others at once, P - 1 states per shard.
`PointToPoint`: each shard adds its own state to what enters it and hands the sum to its neighbour, so that one state
per shard travels, in parts that follow each other like the stages of a pipeline. `exchange_way` says which is shorter.

A shard makes f E + S of what enters: f is 1 or 0, where it carries or a document starts in it, or a factor per head of
a state that decays. First (f, S), then (g, T), is (g f, g S + T): associative, so shards may be joined in any grouping.
The gradient of f is the product of E and the gradient of S, whichever way the states took.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.state import EMPTY, KernelState
from megakernel.parallel.axis import Axis
from megakernel.parallel.exchange_way import parts
from megakernel.parallel.traffic import Traffic

LARGEST_LOG = 80.0
"""Of a float32."""


class Place(NamedTuple):
    """Where a process stands in the order in which shards are read."""

    axis: Axis
    backwards: bool = False
    """Whether the order is that of the axis from its end."""

    @property
    def rank(self) -> int:
        """Shards before this one."""
        return self.axis.size - 1 - self.axis.rank if self.backwards else self.axis.rank

    def neighbour(self, distance: int) -> int | None:
        """World rank of the shard `distance` places behind; None beyond the ends."""
        place = self.axis.rank + (-distance if self.backwards else distance)
        return self.axis.ranks[place] if 0 <= place < self.axis.size else None


class StateExchange(Protocol):
    """One prefix and its backward; `start` and `finish` enclose local work, in forward and in backward."""

    entered: tuple[Tensor, Tensor]
    """The result of `finish`."""

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """Begin with this shard's state, and the factor f by which what enters it leaves: (B,) bool, or (B, H)."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """Sums and log scale of what enters this shard."""
        ...

    def start_backward(self, grad: Tensor) -> None:
        """Begin with the gradient of the sums that entered."""
        ...

    def finish_backward(self) -> Tensor:
        """The gradient of the sums that this shard handed in."""
        ...


class PendingPrefix:
    """A prefix under way (`megakernel.ops.state.PendingState`)."""

    def __init__(self, exchange: StateExchange, state: KernelState, carries: Tensor):
        self._exchange = exchange
        self._ticket = _Start.apply(state.sums, state.log_scale, carries, exchange)

    def wait(self) -> KernelState:
        """The state that enters this shard."""
        sums, log_scale = _Wait.apply(self._ticket, self._exchange)
        return KernelState(sums, log_scale)


class AllGather:
    """Two all-gathers, forward and backward.

    What enters shard r is sum_s weights[r, s] sums_s; the gradient of sums_s is the same sum over r.
    """

    entered: tuple[Tensor, Tensor]

    def __init__(self, place: Place, traffic: Traffic):
        self.rank, self.size = place.rank, place.axis.size
        self.group = place.axis.group
        self.backwards = place.backwards
        self.traffic = traffic

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """Send one message: the state, its scales and the factor of what enters this shard."""
        self.shape, self.scale_dtype, self.factors = sums.shape, log_scale.dtype, carries.shape
        parts = (x.to(sums.dtype).flatten() for x in (sums, log_scale, carries))
        self._gather(torch.cat(tuple(parts)))

    def finish(self) -> tuple[Tensor, Tensor]:
        """See StateExchange."""
        batch, heads = self.shape[:2]
        sizes = [self.shape.numel(), batch * heads, self.factors.numel()]
        sums, log_scales, carries = self._wait().split(sizes, dim=1)
        scales = log_scales.view(self.size, batch, heads)
        entering, weights = prefix_weights(scales, carries.view(self.size, *self.factors))
        self.to_later = weights[self.rank + 1 :, self.rank]
        earlier = sums.view(self.size, *self.shape)[: self.rank]
        return _weighted_sum(weights[self.rank], earlier), entering[self.rank].to(self.scale_dtype)

    def start_backward(self, grad: Tensor) -> None:
        """See StateExchange."""
        self._gather(grad.flatten())

    def finish_backward(self) -> Tensor:
        """See StateExchange."""
        grads = self._wait().view(self.size, *self.shape)
        return _weighted_sum(self.to_later, grads[self.rank + 1 :])

    def _gather(self, message: Tensor) -> None:
        # The message is kept until the wait: the collective reads it from its own stream.
        self._message = message
        self._gathered = message.new_empty(self.size * len(message))
        self._work = dist.all_gather_into_tensor(self._gathered, message, group=self.group, async_op=True)
        self.traffic.sends("state", message, times=self.size - 1)

    def _wait(self) -> Tensor:
        # A device runs behind the calls that fill its queue: there the question has no answer yet.
        with self.traffic.waiting("state", self._message.is_cuda or self._work.is_completed()):
            self._work.wait()
        gathered = self._gathered.view(self.size, -1)
        del self._work, self._message, self._gathered
        return gathered.flip(0) if self.backwards else gathered


class PointToPoint:
    """Point-to-point passing from shard to shard, forward from the first, backward from the last.

    With a and b what the sums that enter a shard and its own are scaled by, E' = a E + b S leaves it; its gradient G'
    comes back, b G' is that of S, and G + a G' goes on to the shard before.
    """

    entered: tuple[Tensor, Tensor]

    def __init__(self, place: Place, traffic: Traffic, background: "Runner"):
        self.place = place
        self.traffic = traffic
        self.background = background

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """See StateExchange."""
        self._run = self.background.run(lambda: self._forward(sums.contiguous(), log_scale, carries))

    def start_backward(self, grad: Tensor) -> None:
        """See StateExchange."""
        self._run = self.background.run(lambda: self._backward(grad.contiguous()))

    def finish(self) -> Any:
        """See StateExchange: what runs, forward or backward, leaves."""
        with self.traffic.waiting("state", self._run.done()):
            result = self._run.result()
        del self._run
        return result

    finish_backward = finish

    def _forward(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> tuple[Tensor, Tensor]:
        entering_log = torch.full_like(log_scale, EMPTY)
        self._receive(entering_log, -1)
        factors = per_head(carries).to(log_scale.dtype)
        carries = factors != 0
        kept_log = torch.where(carries, entering_log + torch.where(carries, factors, 1.0).log(), EMPTY)
        leaving_log = torch.maximum(kept_log, log_scale)
        self._send(leaving_log, 1)
        keep = torch.where(carries, torch.exp(kept_log - leaving_log), 0.0)
        self.keep, self.add = (
            x[..., None, None].to(sums.dtype) for x in (keep, torch.exp(log_scale - leaving_log))
        )
        self.parts = parts(self.place.axis.size, sums.numel() * sums.element_size())
        entering = torch.zeros_like(sums)
        for own, received in zip(self._cut(sums), self._cut(entering)):
            self._pass(received, -1, own * self.add)
        return entering, entering_log

    def _backward(self, grad: Tensor) -> Tensor:
        of_leaving = torch.zeros_like(grad)
        for own, received in zip(self._cut(grad), self._cut(of_leaving)):
            self._pass(received, 1, own)
        return of_leaving * self.add

    def _pass(self, out: Tensor, source: int, own: Tensor) -> None:
        """Receive a part from the neighbour at `source` into `out`; the other one gets what is kept and `own`."""
        received = out.contiguous()
        self._receive(received, source)
        out.copy_(received)
        self._send(own + out * self.keep, -source)

    def _cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of consecutive features."""
        return x.tensor_split(self.parts, dim=2)

    def _receive(self, x: Tensor, distance: int) -> None:
        source = self.place.neighbour(distance)
        if source is not None:
            dist.recv(x, source, group=self.place.axis.group)

    def _send(self, x: Tensor, distance: int) -> None:
        target = self.place.neighbour(distance)
        if target is not None:
            dist.send(x.contiguous(), target, group=self.place.axis.group)
            self.traffic.sends("state", x)


class _Running(Protocol):
    def done(self) -> bool: ...

    def result(self) -> Any: ...


class Runner(Protocol):
    """Where chains run."""

    def run(self, passing: Callable[[], Any]) -> _Running:
        """Begin."""
        ...


class Background:
    """Where chains run while local work goes on: a thread on CPU, a stream of its own on a GPU.

    One after the other, in the order in which they are begun, which is that of all shards.
    """

    def __init__(self, device: torch.device):
        self._threads = ThreadPoolExecutor(1, "state exchange") if device.type == "cpu" else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, passing: Callable[[], Any]) -> _Running:
        """Begin."""
        if self._threads is not None:
            future: Future[Any] = self._threads.submit(passing)
            return future
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            return _Queued(passing(), self._stream)


class _Queued:
    """The future result of a stream."""

    def __init__(self, value: Any, stream: torch.cuda.Stream):
        self._value, self._stream = value, stream

    def done(self) -> bool:
        """Unknown to the process, which runs ahead of the device."""
        return True

    def result(self) -> Any:
        """The value, for work that the current stream is given from here on."""
        torch.cuda.current_stream().wait_stream(self._stream)
        for x in self._value if isinstance(self._value, tuple) else (self._value,):
            x.record_stream(torch.cuda.current_stream())
        return self._value


def per_head(carries: Tensor) -> Tensor:
    """Factors (B, H or 1) of (B,) bool or (B, H)."""
    return carries if carries.dim() == 2 else carries[..., None]


def prefix_weights(log_scales: Tensor, carries: Tensor) -> tuple[Tensor, Tensor]:
    """How much of each shard's sums enters each other shard.

    log_scales: (P, B, H). carries: (P, B), or (P, B, H), the factor by which what enters a shard leaves it. Returns the
    log scale of what enters each shard (P, B, H), and weights (P, P, B, H): [r, s] for the sums of s in what enters r.
    """
    order = torch.arange(len(carries), device=carries.device)
    factors = carries if carries.dim() == 3 else carries[..., None]
    reset = factors == 0
    resets, logs = reset.long().cumsum(0), torch.where(reset, 1.0, factors).log().cumsum(0)
    none = torch.zeros_like(logs[:1])
    resets_before = resets - reset.long()
    logs_before = torch.cat([none, logs[:-1]])
    # s reaches r when no shard between them resets: as many resets before r as up to s.
    earlier = (order[None, :] < order[:, None])[..., None, None]
    reaches = earlier & (resets_before[:, None] == resets[None, :])
    scales = log_scales[None] + (logs_before[:, None] - logs[None])
    entering = torch.where(reaches, scales, EMPTY).amax(1)
    return entering, torch.where(reaches, torch.exp(scales - entering[:, None]), 0.0)


def _weighted_sum(weights: Tensor, states: Tensor) -> Tensor:
    """sum_s weights[s] states[s]: (S, B, H), (S, B, H, F, D) -> (B, H, F, D)."""
    # In a fixed order, and products that no matrix unit rounds.
    total = states.new_zeros(states.shape[1:])
    for weight, state in zip(weights, states):
        total.addcmul_(state, weight[..., None, None])
    return total


class _Start(torch.autograd.Function):
    """Begins the exchange; its backward ends the backward exchange."""

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
        of_sums, of_factor = ctx.exchange.finish_backward(), None
        if ctx.needs_input_grad[2]:
            sums, log_scale = ctx.exchange.entered
            # Of a shard that adds next to nothing, or has no scale, the gradient vanishes before this overflows.
            scale = torch.exp((log_scale - ctx.log_scale).clamp(max=LARGEST_LOG))
            of_factor = (of_sums * sums).sum((-1, -2)) * scale
        return of_sums, None, of_factor, None


class _Wait(torch.autograd.Function):
    """Ends the exchange; its backward begins the backward exchange."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: StateExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        exchange.entered = sums, log_scale = exchange.finish()
        ctx.mark_non_differentiable(log_scale)
        return sums, log_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums_grad: Tensor, scale_grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start_backward(sums_grad)
        return sums_grad.new_zeros(()), None
