"""An op on a shard of a sequence: its keys are summed, an exchange hands over what enters, and its queries read that.

Every launch over tokens is made once. `_Write` gives what the keys add to the state that leaves, the exchange starts,
and while it is under way the caller makes what else is wanted of queries; then `_Read` gives outputs. Backward comes
first to `_Read`, for the gradients of queries and of the state that entered, which starts the exchange of gradients;
while that is under way, to `_Between` and what the caller made; and then to `_Write`, where the gradient of the state
that left enters the states of queries from the right, and keys are visited.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention.arguments import Queries, SequenceInfo, State
from megakernel.ops.kernel_attention.launches import (
    Call,
    gradient_of_first,
    gradient_of_last,
    state_of,
    tiles_of,
)
from megakernel.ops.kernels.features import Phi
from megakernel.ops.state import Exchange, KernelState

MATRIX = 2
"""The place of the projection among what is given of keys, behind keys and values."""


def split(tensors: Sequence[Any], *sizes: int) -> list[Tensors]:
    """Tensors in parts of these sizes, and the rest."""
    rest = iter(tensors)
    return [*(tuple(islice(rest, size)) for size in sizes), tuple(rest)]


class QueryBackward(NamedTuple):
    """What backward knows of queries before it comes to keys."""

    queries: Queries
    grads: Tensors
    """Gradients of what is given of queries."""

    of_matrix: Callable[[], Tensor] | None
    """What queries add to the gradient of the projection, made once; None where nobody wants it."""

    rest: Tensors = ()
    """What else the op's `bwd_write` wants."""


class StateGradients(NamedTuple):
    """A state, and the gradients of its sums and normalizers."""

    state: State
    grads: tuple[Tensor, Tensor]

    def along(self) -> Tensor:
        """(B, H_kv): what a change of all sums of the state by a factor changes."""
        (sums, norms), (of_sums, of_norms) = self.state[:2], self.grads
        return (sums * of_sums).sum((2, 3)) + (norms * of_norms).sum(2)


class Launches(Protocol):
    """An op's launches over the tokens of one call, made of queries and of what is given of keys."""

    @property
    def call(self) -> Call:
        """Of the keys, which have the states between launches."""
        ...

    @property
    def seq(self) -> SequenceInfo:
        """Of the tokens."""
        ...

    def write(self) -> tuple[State, Tensors]:
        """What the keys of each segment add, and what backward wants to know of keys."""
        ...

    def read(self, queries: Tensors, saved: Tensors, state: State) -> Tensors:
        """The output and what else is known of queries. queries: what is given of them; saved: see `write`."""
        ...

    def bwd_read(
        self, grad: Tensor, queries: Tensors, found: Tensors, saved: Tensors, state: State, learned: bool
    ) -> QueryBackward:
        """Gradients of queries. found: what `read` found but the output; learned: so is the projection."""
        ...

    def bwd_write(
        self,
        query_backward: QueryBackward,
        saved: Tensors,
        state: State,
        along: Tensor | None,
        last: StateGradients | None,
        first: StateGradients | None,
    ) -> Tensors:
        """Gradients of what is given of keys. state: of queries; last, first: the states that leave and enter.

        None: a state that nobody reads, or that there is not. along: see `Call.pass_on`, of states that decay, unless
        nobody asks for outputs.
        """
        ...

    def saved(self) -> Tensors:
        """A buffer for what `write` saves."""
        ...

    def found(self, queries: Tensors) -> Tensors:
        """A buffer for what `read` finds."""
        ...

    def no_queries(self, q: Tensor) -> Tensors:
        """What is given of queries q where there are none."""
        ...


class Shard:
    """The launches on one shard. What one part leaves to the next one is kept here in between.

    make: queries and what is given of keys -> Launches.
    """

    def __init__(self, q: Tensor, make: Callable[[Tensor, Tensors], Launches]):
        self.q, self.make = q.detach(), make
        self.written: tuple[Launches, State, Tensors] | None = None
        self.query_backward: tuple[Launches, QueryBackward, State, State | None, StateGradients] | None = None

    def write(self, keys: Tensors) -> tuple[State, Tensors]:
        """What the keys add to the state that leaves, and what backward wants to know of them."""
        launches = self.make(self.q, keys)
        buffer, saved = launches.write()
        seq = launches.seq
        _, own, _ = launches.call.pass_on(buffer, None, seq, seq.length, reverse=False, keep=False)
        self.written = launches, buffer, saved
        # What backward takes where nobody asks for outputs.
        self.q = self.q.new_empty(*self.q.shape[:2], 0, self.q.shape[3])
        return own, saved

    def read(self, first: State, queries: Tensors) -> tuple[Tensors, Tensors]:
        """What `Launches.read` finds, and what backward wants beside: of keys, and the states of segments."""
        assert self.written is not None
        launches, buffer, saved = self.written
        self.written = None
        seq = launches.seq
        entering, *_ = launches.call.pass_on(buffer, first, seq, seq.length, reverse=False)
        return launches.read(queries, saved, entering), (*saved, *entering)

    def bwd_read(
        self,
        grad: Tensor,
        first: State,
        queries: Tensors,
        keys: Tensors,
        found: Tensors,
        saved: Tensors,
        state: Tensors,
    ) -> tuple[Tensors, Tensors]:
        """Gradients of the first state's sums and normalizers, and of what is given of queries."""
        launches = self.make(queries[0], keys)
        learned = keys[MATRIX] is not None and keys[MATRIX].requires_grad
        query_backward = launches.bwd_read(grad, queries, found, saved, State(*state), learned)
        call, seq = launches.call, launches.seq
        buffer = call.sums_of_queries(query_backward.queries, seq, keys[0], seq.length)
        _, of_first, _ = call.pass_on(buffer, None, seq, seq.length, reverse=True, keep=False)
        grads = gradient_of_first(first.logs, of_first)
        has_states = seq.decay is not None and launches.seq.queries > 0
        entered = State(*state) if has_states else None
        self.query_backward = launches, query_backward, buffer, entered, StateGradients(first, grads)
        return grads, query_backward.grads

    def bwd_write(self, grads: tuple[Tensor, Tensor], own: State, keys: Tensors, saved: Tensors) -> Tensors:
        """Gradients of what is given of keys. grads: of the sums and normalizers that `write` found, `own`.

        No `bwd_read` comes before where nobody asks for outputs.
        """
        if self.query_backward is None:
            launches = self.make(self.q, keys)
            queries = launches.no_queries(self.q)
            out, *found = launches.found(queries)
            self.bwd_read(out, own, queries, keys, tuple(found), saved, own)
        assert self.query_backward is not None
        launches, query_backward, buffer, entered, first = self.query_backward
        self.query_backward = None
        seq, outer = launches.seq, gradient_of_last(*grads, own.logs)
        state, _, along = launches.call.pass_on(buffer, outer, seq, seq.length, reverse=True, entered=entered)
        return launches.bwd_write(query_backward, saved, state, along, StateGradients(own, outer[:2]), first)


# Launches are not for torch.compile to trace: as exchanges, they break its graph.
@torch.compiler.disable
def attend(
    shard: Shard,
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
    sums, norms, logs, ticket = _Write.apply(shard, *keys)
    left = state_of(sums, norms, logs, phi, value_dim)
    pending = exchange(left, carries)
    ticket, given = _Between.apply(shard, ticket), queries()
    first = pending.wait()
    found = _Read.apply(shard, len(given), ticket, *tiles_of(first, phi, value_dim), *given, *keys)
    return found, first, left


class _Write(torch.autograd.Function):
    """Its ticket leads through `_Between` to `_Read`, so that backward comes to all three in this order's reverse."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, *keys: Tensor | None) -> tuple[Tensor, ...]:
        own, saved = shard.write(keys)
        ctx.shard, ctx.keys = shard, len(keys)
        ctx.save_for_backward(*own, *keys, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(own.logs)
        return *own, own.logs.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *given: Tensor | None) -> Tensors:
        own, keys, saved = split(ctx.saved_tensors, 3, ctx.keys)
        of_sums, of_norms = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(given, own[:2]))
        return None, *ctx.shard.bwd_write((of_sums, of_norms), State(*own), keys, saved)


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Shard, ticket: Tensor) -> Tensor:
        ctx.shard = shard
        return torch.empty_like(ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> Tensors:
        of_matrix = ctx.shard.query_backward[1].of_matrix
        if of_matrix is not None:
            of_matrix()
        return None, ticket


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Shard, count: int, ticket: Tensor, *given: Tensor | None
    ) -> tuple[Tensor, ...]:
        first, queries, keys = split(given, 3, count)
        found, left = shard.read(State(*first), queries)
        ctx.shard, ctx.sizes = shard, (3, len(queries), len(keys), len(found) - 1, len(left) - 3)
        ctx.save_for_backward(*given, *found[1:], *left)
        ctx.mark_non_differentiable(*found[1:])
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensors:
        first, *known = split(ctx.saved_tensors, *ctx.sizes)
        of_first, of_queries = ctx.shard.bwd_read(grad, State(*first), *known)
        return None, None, grad.new_zeros(()), *of_first, None, *of_queries, *(None,) * ctx.sizes[2]
