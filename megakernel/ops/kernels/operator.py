"""Registers an op's launches on whole sequences as a PyTorch operator, for autograd and torch.compile."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.documents import Positions, carry_factor
from megakernel.ops.joined import gradient_buffers
from megakernel.ops.kernels import shard
from megakernel.ops.kernels.arguments import State
from megakernel.ops.kernels.launch import is_recording
from megakernel.ops.kernels.launcher import map_of_call
from megakernel.ops.kernels.protocol import (
    KeyTensors,
    Launches,
    Op,
    QueryTensors,
    Saved,
    StateGradients,
    StatesBackward,
)
from megakernel.ops.kernels.state_layout import gradient_of_first, gradient_of_last, pack_state, unpack_state
from megakernel.ops.state import Exchange, KernelState
from megakernel.ops.tensors import split

TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", int: "SymInt", bool: "bool"}
"""Type of a field -> type in an operator's schema."""

FIRST = ("first_sums", "first_norms", "first_logs")
"""The initial state among an operator's inputs, each None without one."""


class Inputs(NamedTuple):
    """The inputs of an operator, of the types of its `Op`."""

    queries: Any
    keys: Any
    first: State | None
    options: Any


class Operator:
    """An op as a PyTorch operator whose inputs are the fields of its queries, keys, initial state and options.

    It returns the outputs of `Launches.read`, what `write` saves, the states that enter segments, and the last state.
    """

    def __init__(self, name: str, op: Op):
        self.op = op
        self.sizes = (len(op.queries._fields), len(op.keys._fields), len(FIRST))
        self.num_tensors = sum(self.sizes)
        tensors = [
            (name, kind) for part in (op.queries, op.keys) for name, kind in get_type_hints(part).items()
        ]
        tensors += [(name, Tensor | None) for name in FIRST]
        fields = [*tensors, *get_type_hints(op.options).items()]
        inputs = ", ".join(f"{TYPES[kind]} {field}" for field, kind in fields)
        self.forward = torch.library.custom_op(
            f"megakernel::{name}", self._forward, mutates_args=(), schema=f"({inputs}) -> Tensor[]"
        )
        self.forward.register_fake(self._fake_forward)
        self.backward = torch.library.custom_op(
            f"megakernel::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"(Tensor[] grads, Tensor[] saved, bool[] needed, {inputs}) -> Tensor[]",
        )
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._setup_context)

    def __call__(
        self,
        options: Any,
        queries: QueryTensors,
        keys: KeyTensors,
        positions: Positions,
        first: KernelState | None,
        exchange: Exchange | None,
        return_state: bool = True,
    ) -> tuple[Any, KernelState | None, KernelState | None]:
        """What `Launches.read` returns, the entering state, and the last one, None unless `return_state`.

        With an `exchange`, the entering state comes from it, and the last one is what the keys alone add.
        """
        phi = map_of_call(options, queries.q, keys.projection, keys.log_decay is not None)
        value_dim = keys.v.shape[-1]
        if exchange is not None:
            carries = carry_factor(positions, queries.q, keys.log_decay)
            return shard.attend(self.op, options, queries, keys, exchange, carries, phi)
        packed = (None, None, None) if first is None else pack_state(first, phi, value_dim)
        tensors = (*queries, *keys, *packed)
        if _needs_dispatcher(tensors):
            output = self.forward(*tensors, *options)
        else:
            output = _EagerFunction.apply(self, options, *tensors)
        outputs, *_, last = self._split_output(output)
        return outputs, first, unpack_state(*last, phi, value_dim) if return_state else None

    def _inputs(self, arguments: Sequence[Any]) -> Inputs:
        queries, keys, first, options = split(arguments, *self.sizes)
        state = None if first[0] is None else State(*first)
        return Inputs(self.op.queries(*queries), self.op.keys(*keys), state, self.op.options(*options))

    def _split_output(self, output: Sequence[Tensor]) -> tuple[Any, Any, State, State]:
        """Outputs, saved tensors of keys, the states that enter segments, and the last state."""
        op = self.op
        outputs, saved, entering, last = split(output, len(op.outputs._fields), len(op.saved._fields), 3)
        return op.outputs(*outputs), op.saved(*saved), State(*entering), State(*last)

    def _launches(self, inputs: Inputs) -> Launches:
        return self.op.launches(inputs.options, inputs.queries.q, inputs.keys)

    def _forward(self, *arguments: Any) -> list[Tensor]:
        inputs = self._inputs(arguments)
        launches = self._launches(inputs)
        launcher, seq = launches.launcher, launches.seq
        buffer, saved = launches.write()
        entering, last, _ = launcher.pass_states(buffer, inputs.first, seq, seq.length, reverse=False)
        outputs = launches.read(inputs.queries, saved, entering if launcher.causal else last)
        if not launcher.causal:
            entering = launcher.segment_buffer(inputs.keys.k, 0)
        return [*outputs, *saved, *entering, *last]

    def _fake_forward(self, *arguments: Any) -> list[Tensor]:
        inputs = self._inputs(arguments)
        launches = self._launches(inputs)
        launcher = launches.launcher
        entering = launcher.segment_buffer(inputs.keys.k, launches.seq.length if launcher.causal else 0)
        last = launcher.state_buffer(inputs.keys.k, -1)
        return [*launches.output_buffers(inputs.queries), *launches.key_buffers(), *entering, *last]

    def _backward(
        self,
        grads: list[Tensor],
        saved: list[Tensor],
        needed: list[bool],
        *arguments: Any,
        may_join: bool = False,
    ) -> list[Tensor]:
        """Gradients of the input tensors that are `needed`.

        grads: of the output, and of the last state's sums and normalizers if they have any. may_join: whether those of
        q, k and v may share memory, see `gradient_buffers`; results of PyTorch's operators may not.
        """
        inputs = self._inputs(arguments)
        launches, first = self._launches(inputs), inputs.first
        launcher, seq = launches.launcher, launches.seq
        outputs, of_keys, entering, last = self._split_output(saved)
        if not launcher.causal:
            entering = last
        length = seq.length if launcher.causal else seq.queries
        needs_projection = needed[self.sizes[0] + self.op.keys._fields.index("projection")]
        forward = Saved(outputs, of_keys, entering)
        tokens = (inputs.queries.q, inputs.keys.k, inputs.keys.v)
        dq, dk, dv = gradient_buffers(*tokens) if may_join else [x.new_empty(x.shape) for x in tokens]
        query_backward = launches.bwd_read(grads[0], inputs.queries, forward, dq, needs_projection)
        outer = gradient_of_last(grads[1], grads[2], last.logs) if len(grads) > 1 else None
        buffer = launches.sum_queries(query_backward.queries, length)
        of_segments, of_first, scale_grads = launcher.pass_states(
            buffer, outer, seq, length, reverse=True, entered=None if seq.decay is None else entering
        )
        before = None if first is None else StateGradients(first, gradient_of_first(first.logs, of_first))
        after = None if outer is None else StateGradients(last, outer[:2])
        of_queries = of_segments if launcher.causal else of_first
        states_backward = StatesBackward(of_queries, scale_grads, after, before)
        key_grads = launches.bwd_write(query_backward, of_keys, states_backward, dk, dv)
        of_state = (None, None) if before is None else before.grads
        all_grads = (*query_backward.grads, *key_grads, *of_state, None)
        tensors = arguments[: self.num_tensors]
        pairs = zip(all_grads, tensors, needed, strict=True)
        return [grad.to(x.dtype) for grad, x, is_needed in pairs if is_needed]

    def _fake_backward(self, grads, saved, needed, *arguments):
        return [x.new_empty(x.shape) for x, is_needed in zip(arguments, needed) if is_needed]

    def _setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        ctx.options = inputs[self.num_tensors :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:-3], output[-1])
        ctx.save_for_backward(*inputs[: self.num_tensors], *output)

    def _differentiate(self, ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        input_grads = self.input_gradients(
            self.backward, ctx, ctx.needs_input_grad[: self.num_tensors], grads
        )
        return *input_grads, *(None,) * len(ctx.options)

    def input_gradients(
        self,
        backward: Callable[..., list[Tensor]],
        ctx: Any,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of the tensors from `backward`, None for those not `needed`. ctx: as set up by `_setup_context`."""
        tensors, saved = split(ctx.saved_tensors, self.num_tensors)
        inputs, (*_, last) = self._inputs((*tensors, *ctx.options)), self._split_output(saved)
        outer = materialize_grads(grads[0], (grads[-3], grads[-2]), inputs.queries.q, inputs.keys.v, last[:2])
        found = iter(backward(outer, list(saved), list(needed), *tensors, *ctx.options))
        return [next(found) if is_needed else None for is_needed in needed]


class _EagerFunction(torch.autograd.Function):
    """The operator in plain eager mode, without the Python overhead of PyTorch's custom operators."""

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, options: Sequence[Any], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        # No separate `setup_context`: PyTorch would then inspect this function's signature on every call.
        ctx.operator, output = operator, tuple(operator._forward(*tensors, *options))
        operator._setup_context(ctx, (*tensors, *options), output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator = ctx.operator
        backward = partial(operator._backward, may_join=True)
        return None, None, *operator.input_gradients(backward, ctx, ctx.needs_input_grad[2:], grads)


def _needs_dispatcher(tensors: Sequence[Tensor | None]) -> bool:
    """Whether PyTorch must see the operator itself: a compiler, a dispatch mode, tensor subclasses or meta tensors."""
    if is_recording():  # who counts launches counts those of eager mode
        return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(x is not None and (type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta) for x in tensors)


def materialize_grads(
    do: Tensor | None,
    of_last: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    v: Tensor,
    last: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """Gradients of the output, and of the `last` sums and normalizers if one of them has any; zeros replace None.

    Autograd's own materialization would fill zeros for every output of the op, even those without a gradient.
    """
    if do is None:
        do = v.new_zeros(*q.shape[:3], v.shape[-1])
    if all(grad is None for grad in of_last):
        return [do]
    return [do, *(torch.zeros_like(x) if grad is None else grad for grad, x in zip(of_last, last))]
