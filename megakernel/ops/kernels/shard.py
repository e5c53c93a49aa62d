"""An op on one shard of a sequence: sum its keys, exchange states with other ranks, and read the entering state.

`_Write` computes what the keys add to the outgoing state, which is exchanged; then `_Read` computes outputs. Backward
runs `_Read` first, for the gradient of the entering state, which starts the exchange of gradients. `_Write` comes last:
the gradient of the outgoing state enters the states of queries from the right, and the gradients of keys are computed.

While states or their gradients are in flight, `_Overlap` runs: forward, what outputs need besides the state
(`Launches.read_ahead`); backward, the rest of the queries' gradients (`QueryBackward.finish_dq`) and their part of the
projection's. Everything is computed once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.joined import gradient_buffers
from megakernel.ops.kernels.arguments import State
from megakernel.ops.kernels.feature_maps import Phi
from megakernel.ops.kernels.protocol import (
    KeyTensors,
    Launches,
    Op,
    QueryBackward,
    QueryTensors,
    Saved,
    StateGradients,
    StatesBackward,
)
from megakernel.ops.kernels.state_layout import gradient_of_first, gradient_of_last, pack_state, unpack_state
from megakernel.ops.state import Exchange, KernelState
from megakernel.ops.tensors import Tensors, split


class Shard:
    """An op's launches on one shard; holds what one autograd function passes to the next."""

    def __init__(self, op: Op, options: Any, q: Tensor):
        """q: (B, H, N, d); options: of the type `op.options`."""
        self.op, self.options, self.q = op, options, q.detach()
        self.written: tuple[Launches, State, Any] | None = None
        self.ahead: Any = None
        self.query_backward: tuple[Launches, QueryBackward, State, State | None, StateGradients] | None = None
        self.key_grads: Sequence[Tensor] = ()
        """Buffers for the gradients of k and v."""

    def write(self, keys: KeyTensors) -> tuple[State, Any]:
        """What the keys add to the outgoing state, and tensors of keys to save for backward."""
        launches = self.op.launches(self.options, self.q, keys)
        buffer, saved = launches.write()
        seq = launches.seq
        _, added, _ = launches.launcher.pass_states(buffer, None, seq, seq.length, reverse=False, keep=False)
        self.written = launches, buffer, saved
        # For a backward pass without a gradient of the outputs.
        self.q = self.q.new_empty(*self.q.shape[:2], 0, self.q.shape[3])
        return added, saved

    def read_ahead(self, queries: QueryTensors) -> None:
        """The part of `read` that needs no state."""
        assert self.written is not None
        launches, _, saved = self.written
        self.ahead = launches.read_ahead(queries, saved)

    def read(self, first: State, queries: QueryTensors) -> tuple[Any, Any, State]:
        """What `Launches.read` returns, and what else backward needs: from `write`, and the states of segments."""
        assert self.written is not None
        (launches, buffer, saved), ahead = self.written, self.ahead
        self.written = self.ahead = None
        seq = launches.seq
        entering, *_ = launches.launcher.pass_states(buffer, first, seq, seq.length, reverse=False)
        return launches.read(queries, saved, entering, ahead), saved, entering

    def bwd_read(
        self, do: Tensor, first: State, queries: QueryTensors, keys: KeyTensors, saved: Saved
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Gradients of the first state's sums and normalizers, and of the tensors of queries.

        That of q is complete after `finish_dq`.
        """
        launches = self.op.launches(self.options, queries.q, keys)
        needs_projection = keys.projection is not None and keys.projection.requires_grad
        dq, *self.key_grads = gradient_buffers(queries.q, keys.k, keys.v)
        query_backward = launches.bwd_read(do, queries, saved, dq, needs_projection, exchanges=True)
        launcher, seq = launches.launcher, launches.seq
        buffer = launches.sum_queries(query_backward.queries, seq.length)
        _, of_first, _ = launcher.pass_states(buffer, None, seq, seq.length, reverse=True, keep=False)
        grads = gradient_of_first(first.logs, of_first)
        entered = saved.state if seq.decay is not None and seq.queries > 0 else None
        self.query_backward = launches, query_backward, buffer, entered, StateGradients(first, grads)
        return grads, query_backward.grads

    def finish_dq(self) -> Tensor:
        """The gradient of q, and the queries' part of the projection's, which `bwd_write` adds."""
        assert self.query_backward is not None
        query_backward = self.query_backward[1]
        for finish in (query_backward.finish_dq, query_backward.projection_grad):
            if finish is not None:
                finish()
        dq: Tensor = query_backward.grads.q
        return dq

    def bwd_write(self, grads: tuple[Tensor, Tensor], added: State, keys: KeyTensors, saved: Any) -> Any:
        """Gradients of the tensors of keys. grads: of the sums and normalizers of `added`, the state from `write`.

        If the outputs have no gradient, `bwd_read` has not run before; it then runs here without queries.
        """
        if self.query_backward is None:
            queries = self.op.queries(self.q)
            outputs = self.op.launches(self.options, self.q, keys).output_buffers(queries)
            self.bwd_read(outputs.out, added, queries, keys, Saved(outputs, saved, added))
        assert self.query_backward is not None
        launches, query_backward, buffer, entered, first = self.query_backward
        self.query_backward = None
        seq, outer = launches.seq, gradient_of_last(*grads, added.logs)
        state, _, scale_grads = launches.launcher.pass_states(
            buffer, outer, seq, seq.length, reverse=True, entered=entered
        )
        states = StatesBackward(state, scale_grads, StateGradients(added, outer[:2]), first)
        (dk, dv), self.key_grads = self.key_grads, ()
        return launches.bwd_write(query_backward, saved, states, dk, dv)


# torch.compile must not trace launches: like exchanges, they break the graph.
@torch.compiler.disable
def attend(
    op: Op,
    options: Any,
    queries: QueryTensors,
    keys: KeyTensors,
    exchange: Exchange,
    carries: Tensor,
    phi: Phi,
) -> tuple[Any, KernelState, KernelState]:
    """What `Launches.read` returns, the entering state, and what the keys add to the outgoing one.

    carries: see `state.Exchange`.
    """
    shard, value_dim = Shard(op, options, queries.q), keys.v.shape[-1]
    sums, norms, logs, dependency = _Write.apply(shard, *keys)
    added = unpack_state(sums, norms, logs, phi, value_dim)
    pending = exchange(added, carries)
    dependency, q = _Overlap.apply(shard, dependency, *queries)
    first = pending.wait()
    packed = pack_state(first, phi, value_dim)
    read = op.queries(*queries)._replace(q=q)
    return op.outputs(*_Read.apply(shard, dependency, *packed, *read, *keys)), first, added


class _Write(torch.autograd.Function):
    """Returns a dummy tensor that goes through `_Overlap` to `_Read`, so that backward runs all three in reverse."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, *keys: Tensor | None) -> tuple[Tensor, ...]:
        added, saved = shard.write(shard.op.keys(*keys))
        ctx.shard = shard
        ctx.save_for_backward(*added, *keys, *saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(added.logs)
        return *added, added.logs.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Tensors:
        op = ctx.shard.op
        added, keys, saved = split(ctx.saved_tensors, 3, len(op.keys._fields))
        dsums, dnorms = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, added[:2]))
        return None, *ctx.shard.bwd_write((dsums, dnorms), State(*added), op.keys(*keys), op.saved(*saved))


class _Overlap(torch.autograd.Function):
    """Returns the dummy tensor, and q: its gradient passes through here, because `_Read` leaves it incomplete."""

    @staticmethod
    def forward(ctx: Any, shard: Shard, dependency: Tensor, *queries: Tensor | None) -> tuple[Tensor, Tensor]:
        tensors = shard.op.queries(*queries)
        shard.read_ahead(tensors)
        ctx.shard, ctx.others = shard, len(queries) - 1
        ctx.set_materialize_grads(False)
        return torch.empty_like(dependency), tensors.q.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dependency: Tensor | None, _: None) -> Tensors:
        return None, dependency, ctx.shard.finish_dq(), *(None,) * ctx.others


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Shard, dependency: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        op = shard.op
        ctx.sizes = (3, *(len(each._fields) for each in (op.queries, op.keys, op.outputs, op.saved)))
        first, queries, *_ = split(tensors, *ctx.sizes)
        outputs, saved, entering = shard.read(State(*first), op.queries(*queries))
        ctx.shard = shard
        ctx.save_for_backward(*tensors, *outputs, *saved, *entering)
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, *_: Tensor) -> Tensors:
        op = ctx.shard.op
        first, queries, keys, outputs, of_keys, state = split(ctx.saved_tensors, *ctx.sizes)
        saved = Saved(op.outputs(*outputs), op.saved(*of_keys), State(*state))
        inputs = (State(*first), op.queries(*queries), op.keys(*keys))
        of_first, of_queries = ctx.shard.bwd_read(do, *inputs, saved)
        of_queries = of_queries._replace(q=None)  # `_Overlap` returns it
        return None, do.new_zeros(()), *of_first, None, *of_queries, *(None,) * len(keys)
