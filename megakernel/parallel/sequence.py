"""A piece of the sequence over the context-parallel group: what `attention` asks of its neighbours.

The kernel state is all that every process sends to every other, and its size does not depend on the tokens.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megakernel.ops.state import EMPTY, KernelState, PendingState
from megakernel.parallel.axis import Axis
from megakernel.parallel.tensor import total


class ContextPiece:
    """Piece `rank` of `size`, the others being held by the processes of one axis (a `SequencePiece`).

    Every process of the axis must ask the same questions in the same order, and must run the same backward.
    """

    def __init__(self, axis: Axis):
        self.rank = axis.rank
        self.size = axis.size
        self._group = axis.group

    def previous_tokens(self, x: Tensor, count: int) -> Tensor:
        """The left neighbour's last `count` tokens, zeros on rank 0: (..., N, d) -> (..., count, d)."""
        assert count <= x.shape[-2], (count, x.shape)
        to_right, from_left = [0] * self.size, [0] * self.size
        if self.rank < self.size - 1:
            to_right[self.rank + 1] = count
        if self.rank > 0:
            from_left[self.rank - 1] = count
        last = x[..., x.shape[-2] - count :, :].movedim(-2, 0)
        received = all_to_all(self._group, last[: sum(to_right)], from_left, to_right)
        # Concatenated rather than replaced, so that rank 0 takes part in the neighbours' backward too.
        missing = last.new_zeros(count - len(received), *last.shape[1:])
        return torch.cat([missing, received]).movedim(0, -2)

    def start_prefix(self, state: KernelState, carries: Tensor) -> PendingState:
        """Send `state` to every piece and begin to receive theirs: see `SequencePiece.start_prefix`."""
        exchange = _StateExchange(self.rank, self.size, self._group)
        return _PendingPrefix(exchange, _Start.apply(state.sums, state.log_scale, carries, exchange))

    def start_suffix(self, state: KernelState, carries: Tensor) -> PendingState:
        """The same, with the pieces read from the last to the first."""
        exchange = _StateExchange(self.size - 1 - self.rank, self.size, self._group, backwards=True)
        return _PendingPrefix(exchange, _Start.apply(state.sums, state.log_scale, carries, exchange))

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the pieces, on each of them."""
        return total(x, self._group)

    def all_tokens(self, x: Tensor) -> Tensor:
        """(..., n, d) of mine -> (..., size * n, d) of all pieces in order."""
        tokens_first = x.movedim(-2, 0).contiguous()
        return gather_from_sequence_parallel_region(tokens_first, group=self._group).movedim(0, -2)

    def tokens_to_heads(self, x: Tensor) -> Tensor:
        """(B, H, N, d) with my tokens of all heads -> (B, H / size, N * size, d), all tokens of my heads."""
        batch, heads, tokens, dim = x.shape
        assert heads % self.size == 0, f"{heads} heads over {self.size} context ranks"
        by_receiver = x.unflatten(1, (self.size, heads // self.size)).movedim(1, 0)
        by_sender = all_to_all(self._group, by_receiver)
        return by_sender.movedim(0, 2).reshape(batch, heads // self.size, self.size * tokens, dim)

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """The inverse of `tokens_to_heads`."""
        by_receiver = x.unflatten(2, (self.size, -1)).movedim(2, 0)
        by_sender = all_to_all(self._group, by_receiver)
        return by_sender.movedim(0, 1).flatten(1, 2)


class _PendingPrefix:
    def __init__(self, exchange: "_StateExchange", ticket: Tensor):
        self._exchange = exchange
        self._ticket = ticket

    def wait(self) -> KernelState:
        sums, log_scale = _Wait.apply(self._ticket, self._exchange)
        return KernelState(sums, log_scale)


class _StateExchange:
    """One prefix and its backward: two asynchronous all-gathers, each begun and ended by two autograd nodes.

    What enters piece r is sum_s weights[r, s] sums_s; the gradient of sums_s is the same sum over r.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup, backwards: bool = False):
        """rank: the piece's place in the order of reading, which may be that of the group backwards."""
        self.rank = rank
        self.size = size
        self.group = group
        self.backwards = backwards

    def start(self, sums: Tensor, log_scale: Tensor, carries: Tensor) -> None:
        """Send one message: the state, its scales and whether this piece carries."""
        self.shape, self.scale_dtype = sums.shape, log_scale.dtype
        self._gather(torch.cat([sums.flatten(), log_scale.to(sums.dtype).flatten(), carries.to(sums.dtype)]))

    def finish(self) -> tuple[Tensor, Tensor]:
        """What enters this piece."""
        batch, heads = self.shape[:2]
        sizes = [self.shape.numel(), batch * heads, batch]
        sums, log_scales, carries = self._wait().split(sizes, dim=1)
        scales = log_scales.view(self.size, batch, heads)
        entering, weights = prefix_weights(scales, carries)
        self.to_later = weights[self.rank + 1 :, self.rank]
        earlier = sums.view(self.size, *self.shape)[: self.rank]
        return _weighted_sum(weights[self.rank], earlier), entering[self.rank].to(self.scale_dtype)

    def start_backward(self, grad: Tensor) -> None:
        """Send the gradient of what entered this piece."""
        self._gather(grad.flatten())

    def finish_backward(self) -> Tensor:
        """The gradient of the sums this piece sent."""
        grads = self._wait().view(self.size, *self.shape)
        return _weighted_sum(self.to_later, grads[self.rank + 1 :])

    def _gather(self, message: Tensor) -> None:
        # The message is kept until the wait: the collective reads it from its own stream.
        self._message = message
        self._gathered = message.new_empty(self.size * len(message))
        self._work = dist.all_gather_into_tensor(self._gathered, message, group=self.group, async_op=True)

    def _wait(self) -> Tensor:
        self._work.wait()
        gathered = self._gathered.view(self.size, -1)
        del self._work, self._message, self._gathered
        return gathered.flip(0) if self.backwards else gathered


def prefix_weights(log_scales: Tensor, carries: Tensor) -> tuple[Tensor, Tensor]:
    """How much of each piece's sums enters each other piece.

    log_scales: (P, B, H). carries: (P, B), 1 where what enters a piece also leaves it. Returns the log scale
    of what enters each piece (P, B, H), and weights (P, P, B, H): [r, s] for the sums of s in what enters r.
    """
    order = torch.arange(len(carries), device=carries.device)
    resets = (1 - carries).cumsum(0)
    resets_before = resets - (1 - carries)
    # s reaches r when no piece between them resets: as many resets before r as up to s.
    earlier = (order[None, :] < order[:, None])[..., None]
    reaches = (earlier & (resets_before[:, None] == resets[None, :]))[..., None]
    entering = torch.where(reaches, log_scales[None], EMPTY).amax(1)
    return entering, torch.where(reaches, torch.exp(log_scales[None] - entering[:, None]), 0.0)


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
        ctx: FunctionCtx, sums: Tensor, log_scale: Tensor, carries: Tensor, exchange: _StateExchange
    ) -> Tensor:
        ctx.exchange = exchange  # type: ignore[attr-defined]
        exchange.start(sums, log_scale, carries)
        return sums.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, ticket_grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.finish_backward(), None, None, None  # type: ignore[attr-defined]


class _Wait(torch.autograd.Function):
    """Ends the exchange; its backward begins the backward exchange."""

    @staticmethod
    def forward(ctx: FunctionCtx, ticket: Tensor, exchange: _StateExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange  # type: ignore[attr-defined]
        sums, log_scale = exchange.finish()
        ctx.mark_non_differentiable(log_scale)
        return sums, log_scale

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, sums_grad: Tensor, scale_grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.start_backward(sums_grad)  # type: ignore[attr-defined]
        return sums_grad.new_zeros(()), None
