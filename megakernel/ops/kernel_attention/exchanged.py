"""An op on a shard of a row: its keys are summed, an exchange hands over what enters, and its queries read that.

Every launch over tokens is made once. `_Write` gives what the keys add to the state that leaves, the exchange starts,
and while it is under way the caller makes what else is wanted of queries; then `_Read` gives outputs. Backward comes
first to `_Read`, for the gradients of queries and of the state that entered, which starts the exchange of gradients;
while that is under way, to `_Between` and what the caller made; and then to `_Write`, where the gradient of the state
that left enters the states of queries from the right, and keys are visited.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention.arguments import State
from megakernel.ops.kernel_attention.launches import state_of, tiles_of
from megakernel.ops.kernels.features import Phi
from megakernel.ops.state import Exchange, KernelState


class Launches(Protocol):
    """An op's launches on one shard. What one part leaves to the next one is kept here in between."""

    behind: Any
    """What `bwd_read` leaves to `bwd_write`, of which `of_matrix` makes what queries add to the gradient of the
    projection, once, and is None where nobody wants it."""

    def write(self, *keys: Any) -> tuple[State, Tensors]:
        """What the keys add to the state that leaves, and what backward wants to know of them."""
        ...

    def read(self, first: State, *given: Any) -> tuple[Tensors, Tensors]:
        """The output and what else the caller wants, and what backward wants beside. given: of queries, of keys."""
        ...

    def bwd_read(self, grad: Tensor, first: State, *known: Any) -> tuple[Tensors, Tensors]:
        """Gradients of the first state's sums and normalizers, and of what is given of queries.

        known: what `read` was given, what it found but the output, and what it left.
        """
        ...

    def bwd_write(self, grads: tuple[Tensor, Tensor], own: State, *known: Any) -> Tensors:
        """Gradients of what is given of keys. grads: of the sums and normalizers that `write` found, `own`.

        known: what `write` was given and what it left. No `bwd_read` comes before where nobody asks for outputs.
        """
        ...


# Launches are not for torch.compile to trace: as exchanges, they break its graph.
@torch.compiler.disable
def attend(
    launches: Launches,
    keys: Tensors,
    queries: Callable[[], Tensors],
    exchange: Exchange,
    carries: Tensor,
    phi: Phi,
    value_dim: int,
) -> tuple[Tensors, KernelState, KernelState]:
    """What `Launches.read` finds, the state that entered, and what the keys add to the one that leaves.

    queries: makes what `read` is given of queries, while the exchange is under way. carries: see `state.Exchange`.
    """
    sums, norms, logs, ticket = _Write.apply(launches, *keys)
    left = state_of(sums, norms, logs, phi, value_dim)
    pending = exchange(left, carries)
    ticket, given = _Between.apply(launches, ticket), queries()
    first = pending.wait()
    found = _Read.apply(launches, len(given), ticket, *tiles_of(first, phi, value_dim), *given, *keys)
    return found, first, left


class _Write(torch.autograd.Function):
    """Its ticket leads through `_Between` to `_Read`, so that backward comes to all three in this order's reverse."""

    @staticmethod
    def forward(ctx: Any, launches: Launches, *keys: Tensor | None) -> tuple[Tensor, ...]:
        own, left = launches.write(*keys)
        ctx.launches = launches
        ctx.save_for_backward(*own, *keys, *left)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(own.logs)
        return *own, own.logs.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Tensors:
        sums, norms, logs, *known = ctx.saved_tensors
        of_sums, of_norms = (
            torch.zeros_like(x) if grad is None else grad for grad, x in zip(given, (sums, norms))
        )
        return None, *ctx.launches.bwd_write((of_sums, of_norms), State(sums, norms, logs), *known)


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launches: Launches, ticket: Tensor) -> Tensor:
        ctx.launches = launches
        return torch.empty_like(ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> Tensors:
        of_matrix = ctx.launches.behind.of_matrix
        if of_matrix is not None:
            of_matrix()
        return None, ticket


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, launches: Launches, queries: int, ticket: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        first, tensors = State(*given[:3]), given[3:]
        found, left = launches.read(first, *tensors)
        ctx.launches, ctx.missing = launches, len(tensors) - queries
        ctx.save_for_backward(*first, *tensors, *found[1:], *left)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensors:
        sums, norms, logs, *known = ctx.saved_tensors
        of_first, of_queries = ctx.launches.bwd_read(grad, State(sums, norms, logs), *known)
        return None, None, grad.new_zeros(()), *of_first, None, *of_queries, *(None,) * ctx.missing
