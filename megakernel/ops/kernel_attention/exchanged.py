"""An op on one shard of a sequence: sum its keys, exchange states with other ranks, and read the entering state.

Every kernel over tokens runs once. `_Write` computes what the keys add to the outgoing state, which is exchanged; then
`_Read` computes outputs. Backward runs `_Read` first, for the gradients of queries and of the entering state, which
starts the exchange of gradients. While that is in flight, it runs `_Overlap`. `_Write` comes last: the gradient of the
outgoing state enters the states of queries from the right, and the gradients of keys are computed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.groups import Tensors, split
from megakernel.ops.kernel_attention.arguments import Queries, SequenceInfo, State
from megakernel.ops.kernel_attention.launches import (
    MATRIX,
    Launcher,
    gradient_of_first,
    gradient_of_last,
    pack_state,
    unpack_state,
)
from megakernel.ops.kernels.features import Phi
from megakernel.ops.state import Exchange, KernelState


class Saved(NamedTuple):
    """What the backward pass over queries takes from forward."""

    queries: Tensors
    """From `Launches.read`."""

    keys: Tensors
    """From `Launches.write`."""

    state: State
    """The states that queries read."""


class QueryBackward(NamedTuple):
    """Results of the backward pass over queries, used by the pass over keys."""

    queries: Queries
    grads: Tensors
    """Gradients of the tensors of queries."""

    matrix_grad: Callable[[], Tensor] | None
    """Computes (and caches) the queries' part of the projection's gradient; None if that is not needed."""

    rest: Tensors = ()
    """Other inputs of the op's `bwd_write`."""


class StateGradients(NamedTuple):
    """A state, and the gradients of its sums and normalizers."""

    state: State
    grads: tuple[Tensor, Tensor]

    def scale_grad(self) -> Tensor:
        """(B, H_kv): the gradient of the state's log scale."""
        (sums, norms), (of_sums, of_norms) = self.state[:2], self.grads
        return (sums * of_sums).sum((2, 3)) + (norms * of_norms).sum(2)


class StatesBackward(NamedTuple):
    """What the backward pass over keys takes from that over states."""

    of_queries: State
    """The states of queries."""

    scale_grads: Tensor | None
    """From `Launcher.pass_states`, for decaying states; None if outputs have no gradient."""

    last: StateGradients | None
    """Of the outgoing state; None if that is unused."""

    first: StateGradients | None
    """Of the entering state; None without one."""

    @property
    def of_entering(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the log scales of the states that enter segments, and of the one that enters the sequence."""
        return self.scale_grads, None if self.first is None else self.first.scale_grad()


class Launches(Protocol):
    """An op's launches for one call, built from queries and the tensors of keys."""

    @property
    def launcher(self) -> Launcher:
        """The sizes of the launches over keys."""

    @property
    def seq(self) -> SequenceInfo:
        """The sequences."""

    def write(self) -> tuple[State, Tensors]:
        """The sums over the keys of each segment, and tensors of keys to save for backward."""

    def read(self, queries: Tensors, saved: Tensors, state: State) -> Tensors:
        """The output, and tensors of queries to save. queries: their input tensors; saved: from `write`."""

    def bwd_read(self, grad: Tensor, queries: Tensors, saved: Saved, needs_matrix: bool) -> QueryBackward:
        """Gradients of queries. needs_matrix: whether the projection needs a gradient, too."""

    def bwd_write(self, query_backward: QueryBackward, saved: Tensors, states: StatesBackward) -> Tensors:
        """Gradients of the tensors of keys. saved: from `write`."""

    def key_buffers(self) -> Tensors:
        """Buffers for what `write` saves."""

    def output_buffers(self, queries: Tensors) -> Tensors:
        """Buffers for what `read` returns."""

    def empty_queries(self, q: Tensor) -> Tensors:
        """The tensors of queries for q without tokens."""


class Shard:
    """The launches on one shard; holds what one autograd function passes to the next.

    make_launches: queries and the tensors of keys -> Launches.
    """

    def __init__(self, q: Tensor, make_launches: Callable[[Tensor, Tensors], Launches]):
        self.q, self.make_launches = q.detach(), make_launches
        self.written: tuple[Launches, State, Tensors] | None = None
        self.query_backward: tuple[Launches, QueryBackward, State, State | None, StateGradients] | None = None

    def write(self, keys: Tensors) -> tuple[State, Tensors]:
        """What the keys add to the outgoing state, and tensors of keys to save for backward."""
        launches = self.make_launches(self.q, keys)
        buffer, saved = launches.write()
        seq = launches.seq
        _, added, _ = launches.launcher.pass_states(buffer, None, seq, seq.length, reverse=False, keep=False)
        self.written = launches, buffer, saved
        # For a backward pass without a gradient of the outputs.
        self.q = self.q.new_empty(*self.q.shape[:2], 0, self.q.shape[3])
        return added, saved

    def read(self, first: State, queries: Tensors) -> tuple[Tensors, Tensors]:
        """What `Launches.read` returns, and what else backward needs: tensors of keys and the states of segments."""
        assert self.written is not None
        launches, buffer, saved = self.written
        self.written = None
        seq = launches.seq
        entering, *_ = launches.launcher.pass_states(buffer, first, seq, seq.length, reverse=False)
        return launches.read(queries, saved, entering), (*saved, *entering)

    def bwd_read(
        self, grad: Tensor, first: State, queries: Tensors, keys: Tensors, saved: Saved
    ) -> tuple[Tensors, Tensors]:
        """Gradients of the first state's sums and normalizers, and of the tensors of queries."""
        launches = self.make_launches(queries[0], keys)
        needs_matrix = keys[MATRIX] is not None and keys[MATRIX].requires_grad
        query_backward = launches.bwd_read(grad, queries, saved, needs_matrix)
        launcher, seq = launches.launcher, launches.seq
        buffer = launcher.sum_queries(query_backward.queries, seq, keys[0], seq.length)
        _, of_first, _ = launcher.pass_states(buffer, None, seq, seq.length, reverse=True, keep=False)
        grads = gradient_of_first(first.logs, of_first)
        entered = saved.state if seq.decay is not None and seq.queries > 0 else None
        self.query_backward = launches, query_backward, buffer, entered, StateGradients(first, grads)
        return grads, query_backward.grads

    def bwd_write(self, grads: tuple[Tensor, Tensor], added: State, keys: Tensors, saved: Tensors) -> Tensors:
        """Gradients of the tensors of keys. grads: of the sums and normalizers of `added`, the state from `write`.

        If the outputs have no gradient, `bwd_read` has not run before; it then runs here without queries.
        """
        if self.query_backward is None:
            launches = self.make_launches(self.q, keys)
            queries = launches.empty_queries(self.q)
            outputs = launches.output_buffers(queries)
            self.bwd_read(outputs[0], added, queries, keys, Saved(outputs, saved, added))
        assert self.query_backward is not None
        launches, query_backward, buffer, entered, first = self.query_backward
        self.query_backward = None
        seq, outer = launches.seq, gradient_of_last(*grads, added.logs)
        state, _, scale_grads = launches.launcher.pass_states(
            buffer, outer, seq, seq.length, reverse=True, entered=entered
        )
        states = StatesBackward(state, scale_grads, StateGradients(added, outer[:2]), first)
        return launches.bwd_write(query_backward, saved, states)


# torch.compile must not trace launches: like exchanges, they break the graph.
@torch.compiler.disable
def attend(
    make_launches: Callable[[Tensor, Tensors], Launches],
    queries: Tensors,
    keys: Tensors,
    exchange: Exchange,
    carries: Tensor,
    phi: Phi,
) -> tuple[Tensors, KernelState, KernelState]:
    """What `Launches.read` returns, the entering state, and what the keys add to the outgoing one.

    carries: see `state.Exchange`.
    """
    shard, value_dim = Shard(queries[0], make_launches), keys[1].shape[-1]
    sums, norms, logs, ticket = _Write.apply(shard, *keys)
    added = unpack_state(sums, norms, logs, phi, value_dim)
    pending = exchange(added, carries)
    ticket = _Overlap.apply(shard, ticket)
    first = pending.wait()
    packed = pack_state(first, phi, value_dim)
    return _Read.apply(shard, len(queries), ticket, *packed, *queries, *keys), first, added


class _Write(torch.autograd.Function):
    """Returns a dummy `ticket` that goes through `_Overlap` to `_Read`, so that backward runs all three in reverse."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, *keys: Tensor | None) -> tuple[Tensor, ...]:
        added, saved = shard.write(keys)
        ctx.shard, ctx.keys = shard, len(keys)
        ctx.save_for_backward(*added, *keys, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(added.logs)
        return *added, added.logs.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        added, keys, saved = split(ctx.saved_tensors, 3, ctx.keys)
        dsums, dnorms = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, added[:2]))
        return None, *ctx.shard.bwd_write((dsums, dnorms), State(*added), keys, saved)


class _Overlap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Shard, ticket: Tensor) -> Tensor:
        ctx.shard = shard
        return torch.empty_like(ticket)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ticket: Tensor) -> Tensors:
        matrix_grad = ctx.shard.query_backward[1].matrix_grad
        if matrix_grad is not None:
            matrix_grad()
        return None, ticket


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Shard, num_queries: int, ticket: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        first, queries, keys = split(tensors, 3, num_queries)
        outputs, saved = shard.read(State(*first), queries)
        ctx.shard, ctx.sizes = shard, (3, len(queries), len(keys), len(outputs), len(saved) - 3)
        ctx.save_for_backward(*tensors, *outputs, *saved)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensors:
        first, queries, keys, outputs, of_keys, state = split(ctx.saved_tensors, *ctx.sizes)
        saved = Saved(outputs, of_keys, State(*state))
        of_first, of_queries = ctx.shard.bwd_read(grad, State(*first), queries, keys, saved)
        return None, None, grad.new_zeros(()), *of_first, None, *of_queries, *(None,) * ctx.sizes[2]
