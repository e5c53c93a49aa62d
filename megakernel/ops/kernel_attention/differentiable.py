"""Registers an op's launches on whole sequences as PyTorch operators, for autograd and torch.compile."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.documents import Positions, carry_factor
from megakernel.ops.groups import Tensors, split
from megakernel.ops.kernel_attention import exchanged
from megakernel.ops.kernel_attention.arguments import State
from megakernel.ops.kernel_attention.exchanged import Launches, Saved, StateGradients, StatesBackward
from megakernel.ops.kernel_attention.launches import (
    DECAY,
    MATRIX,
    gradient_of_first,
    gradient_of_last,
    map_of_call,
    materialize_grads,
    pack_state,
    unpack_state,
)
from megakernel.ops.state import Exchange, KernelState

MakeLaunches = Callable[[Sequence[Any], Tensor, Tensors], Launches]
"""(option values, queries, tensors of keys) -> launches."""

TYPES = {str: "str", int: "SymInt", bool: "bool"}
"""Python type -> type in an operator's schema."""


class Operator:
    """An operator on tensors (of queries, of keys, and an initial state, any of them None) and `options`.

    It returns the outputs of `Launches.read`, what `write` saves, the states that enter segments, and the last state.
    Schemas have no lists with None: an operator takes the tensors that are not None and their indices, `places`.
    """

    def __init__(
        self, name: str, options: Mapping[str, type], make: MakeLaunches, queries: int, keys: int, saved: int
    ):
        self.make, self.sizes, self.num_saved = make, (queries, keys, 3), saved
        parameters = ", ".join(f"{TYPES[kind]} {option}" for option, kind in options.items())
        inputs = f"Tensor[] tensors, int[] places, {parameters}"
        self.forward = torch.library.custom_op(
            f"megakernel::{name}", self._forward, mutates_args=(), schema=f"({inputs}) -> Tensor[]"
        )
        self.forward.register_fake(self._fake_forward)
        self.backward = torch.library.custom_op(
            f"megakernel::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"(Tensor[] grads, Tensor[] saved, int[] wanted, {inputs}) -> Tensor[]",
        )
        self.backward.register_fake(self._fake_backward)
        self.forward.register_autograd(self._differentiate, setup_context=self._setup_context)

    def __call__(
        self,
        options: Sequence[Any],
        queries: Tensors,
        keys: Tensors,
        positions: Positions,
        first: KernelState | None,
        exchange: Exchange | None,
        return_state: bool = True,
    ) -> tuple[Sequence[Tensor], KernelState | None, KernelState | None]:
        """What `Launches.read` returns and further tensors, the entering state, and the last one.

        With an `exchange`, the entering state comes from it, and the last one is what the keys alone add.
        """
        phi, value_dim = map_of_call(options, queries[0], keys), keys[1].shape[-1]
        if exchange is not None:
            carries = carry_factor(positions, queries[0], keys[DECAY])
            return exchanged.attend(partial(self.make, options), queries, keys, exchange, carries, phi)
        packed: Tensors = (None, None, None) if first is None else pack_state(first, phi, value_dim)
        *outputs, sums, norms, logs = self._run((*queries, *keys, *packed), *options)
        return outputs, first, unpack_state(sums, norms, logs, phi, value_dim) if return_state else None

    def _run(self, optional_tensors: Tensors, *options: Any) -> Sequence[Tensor]:
        tensors, places = pack_tensors(optional_tensors)
        if _needs_dispatcher(tensors):
            return self.forward(tensors, places, *options)
        return _EagerFunction.apply(self, (places, *options), *tensors)

    def _launches(self, tensors: list[Tensor], places: list[int], options: Sequence[Any]):
        """Launches, tensors of queries and of keys, and the initial state or None."""
        optional_tensors: list[Tensor | None] = [None] * sum(self.sizes)
        for place, x in zip(places, tensors):
            optional_tensors[place] = x
        queries, keys, first, _ = split(optional_tensors, *self.sizes)
        state = None if first[0] is None else State(*first)
        return self.make(options, queries[0], keys), queries, keys, state

    def _forward(self, tensors: list[Tensor], places: list[int], *options: Any) -> list[Tensor]:
        launches, queries, keys, first = self._launches(tensors, places, options)
        launcher, seq = launches.launcher, launches.seq
        buffer, saved = launches.write()
        entering, last, _ = launcher.pass_states(buffer, first, seq, seq.length, reverse=False)
        outputs = launches.read(queries, saved, entering if launcher.causal else last)
        if not launcher.causal:
            entering = launcher.segment_buffer(keys[0], 0)
        return [*outputs, *saved, *entering, *last]

    def _fake_forward(self, tensors: list[Tensor], places: list[int], *options: Any) -> list[Tensor]:
        launches, queries, keys, _ = self._launches(tensors, places, options)
        launcher = launches.launcher
        entering = launcher.segment_buffer(keys[0], launches.seq.length if launcher.causal else 0)
        last = launcher.state_buffer(keys[0], -1)
        return [*launches.output_buffers(queries), *launches.key_buffers(), *entering, *last]

    def _backward(
        self,
        grads: list[Tensor],
        saved: list[Tensor],
        wanted: list[int],
        tensors: list[Tensor],
        places: list[int],
        *options: Any,
    ) -> list[Tensor]:
        """Gradients of the tensors at the places `wanted`.

        grads: of the output, and of the last state's sums and normalizers if they have any.
        """
        launches, queries, keys, first = self._launches(tensors, places, options)
        launcher, seq = launches.launcher, launches.seq
        outputs, of_keys, *states = split(saved, len(saved) - 6 - self.num_saved, self.num_saved, 3)
        entering, last = (State(*state) for state in states)
        if not launcher.causal:
            entering = last
        length = seq.length if launcher.causal else seq.queries
        needs_matrix = self.sizes[0] + MATRIX in wanted
        query_backward = launches.bwd_read(grads[0], queries, Saved(outputs, of_keys, entering), needs_matrix)
        outer = gradient_of_last(grads[1], grads[2], last.logs) if len(grads) > 1 else None
        buffer = launcher.sum_queries(query_backward.queries, seq, keys[0], length)
        of_segments, of_first, scale_grads = launcher.pass_states(
            buffer, outer, seq, length, reverse=True, entered=None if seq.decay is None else entering
        )
        before = None if first is None else StateGradients(first, gradient_of_first(first.logs, of_first))
        after = None if outer is None else StateGradients(last, outer[:2])
        of_queries = of_segments if launcher.causal else of_first
        states_backward = StatesBackward(of_queries, scale_grads, after, before)
        key_grads = launches.bwd_write(query_backward, of_keys, states_backward)
        all_grads = (*query_backward.grads, *key_grads, *(before.grads if before is not None else ()))
        return [all_grads[place].to(x.dtype) for place, x in zip(places, tensors) if place in wanted]

    def _fake_backward(self, grads, saved, wanted, tensors, places, *options):
        return [x.new_empty(x.shape) for place, x in zip(places, tensors) if place in wanted]

    def _setup_context(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        tensors, *ctx.options = inputs
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:-3], output[-1])
        ctx.save_for_backward(*tensors, *output)

    def _differentiate(self, ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Any]:
        input_grads = self.input_gradients(self.backward, ctx, ctx.needs_input_grad[0], grads)
        return input_grads, *(None,) * len(ctx.options)

    def input_gradients(
        self,
        backward: Callable[..., list[Tensor]],
        ctx: Any,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of the tensors from `backward`, None for those not `needed`. ctx: as set up by `_setup_context`."""
        tensors, saved = split(ctx.saved_tensors, ctx.count)
        places = ctx.options[0]
        wanted = [place for place, is_needed in zip(places, needed) if is_needed]
        q, v = tensors[0], tensors[places.index(self.sizes[0] + 1)]
        outer = materialize_grads(grads[0], (grads[-3], grads[-2]), q, v, saved[-3:-1])
        input_grads = dict(zip(wanted, backward(outer, list(saved), wanted, list(tensors), *ctx.options)))
        return [input_grads.get(place) for place in places]


class _EagerFunction(torch.autograd.Function):
    """The operator in plain eager mode, without the Python overhead of PyTorch's custom operators."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, options: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        # No separate `setup_context`: PyTorch would then inspect this function's signature on every call.
        ctx.operator, output = operator, tuple(operator._forward(list(tensors), *options))
        operator._setup_context(ctx, (tensors, *options), output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator = ctx.operator
        return None, None, *operator.input_gradients(operator._backward, ctx, ctx.needs_input_grad[2:], grads)


def _needs_dispatcher(tensors: list[Tensor]) -> bool:
    """Whether PyTorch must see the operator itself: a compiler, a dispatch mode, tensor subclasses or meta tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in tensors)


def pack_tensors(optional_tensors: Tensors) -> tuple[list[Tensor], list[int]]:
    """The tensors that are not None, and their indices."""
    places = [place for place, x in enumerate(optional_tensors) if x is not None]
    return [optional_tensors[place] for place in places], places
