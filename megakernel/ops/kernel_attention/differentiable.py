"""An op's launches on whole sequences as operators of PyTorch, which differentiates and compiles around them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention.arguments import State
from megakernel.ops.kernel_attention.exchanged import MATRIX, Launches, StateGradients, split
from megakernel.ops.kernel_attention.launches import given_or_zeros, gradient_of_first, gradient_of_last

Make = Callable[[Sequence[Any], Tensor, Tensors], Launches]
"""(values of the options, queries, what is given of keys) -> launches."""

TYPES = {str: "str", int: "SymInt", bool: "bool"}
"""Python's types -> those of operators."""


class Operator:
    """A function of tensors (those of queries, of keys, and a first state, any of them None) and `options`.

    It gives what `Launches.read` found, what `write` saved, the states that enter segments, and the last state.
    Operators take no lists with None in them: they get the tensors that are there, and the places of these.
    """

    def __init__(
        self, name: str, options: Mapping[str, type], make: Make, queries: int, keys: int, saved: int
    ):
        self.make, self.sizes, self.saves = make, (queries, keys, 3), saved
        known = ", ".join(f"{TYPES[kind]} {option}" for option, kind in options.items())
        given = f"Tensor[] tensors, int[] places, {known}"
        self.forward = torch.library.custom_op(
            f"megakernel::{name}", self._forward, mutates_args=(), schema=f"({given}) -> Tensor[]"
        )
        self.forward.register_fake(self._outputs)
        self.backward = torch.library.custom_op(
            f"megakernel::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"(Tensor[] grads, Tensor[] kept, int[] wanted, {given}) -> Tensor[]",
        )
        self.backward.register_fake(self._gradients)
        self.forward.register_autograd(self._differentiate, setup_context=self._keep)

    def __call__(self, given: Tensors, *options: Any) -> Sequence[Tensor]:
        """The outputs of the operator."""
        tensors, places = pack(given)
        if _is_watched(tensors):
            return self.forward(tensors, places, *options)
        return _Direct.apply(self, (places, *options), *tensors)

    def _launches(self, tensors: list[Tensor], places: list[int], options: Sequence[Any]):
        """Launches, tensors of queries and of keys, and the first state, None where there is none."""
        given: list[Tensor | None] = [None] * sum(self.sizes)
        for place, x in zip(places, tensors):
            given[place] = x
        queries, keys, first, _ = split(given, *self.sizes)
        state = None if first[0] is None else State(*first)
        return self.make(options, queries[0], keys), queries, keys, state

    def _forward(self, tensors: list[Tensor], places: list[int], *options: Any) -> list[Tensor]:
        launches, queries, keys, first = self._launches(tensors, places, options)
        call, seq = launches.call, launches.seq
        buffer, saved = launches.write()
        entering, last, _ = call.pass_on(buffer, first, seq, seq.length, reverse=False)
        found = launches.read(queries, saved, entering if call.causal else last)
        if not call.causal:
            entering = call.sums_of_segments(keys[0], 0)
        return [*found, *saved, *entering, *last]

    def _outputs(self, tensors: list[Tensor], places: list[int], *options: Any) -> list[Tensor]:
        launches, queries, keys, _ = self._launches(tensors, places, options)
        call = launches.call
        buffer = call.sums_of_segments(keys[0], launches.seq.length if call.causal else 0)
        return [*launches.found(queries), *launches.saved(), *buffer, *call.states(keys[0], -1)]

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

        grads: of the output, and of the last sums and normalizers where anybody reads these.
        """
        launches, queries, keys, first = self._launches(tensors, places, options)
        call, seq = launches.call, launches.seq
        found, of_keys, state, left = split(saved, len(saved) - 6 - self.saves, self.saves, 3)
        last, length = State(*left), seq.length if call.causal else seq.queries
        entering = State(*state) if call.causal else last
        learned = self.sizes[0] + MATRIX in wanted
        query_backward = launches.bwd_read(grads[0], queries, found, of_keys, entering, learned)
        outer = gradient_of_last(grads[1], grads[2], last.logs) if len(grads) > 1 else None
        buffer = call.sums_of_queries(query_backward.queries, seq, keys[0], length)
        entered = None if seq.decay is None else entering
        of_segments, of_first, along = call.pass_on(buffer, outer, seq, length, reverse=True, entered=entered)
        before = None if first is None else StateGradients(first, gradient_of_first(first.logs, of_first))
        after = None if outer is None else StateGradients(last, outer[:2])
        of_given = launches.bwd_write(
            query_backward, of_keys, of_segments if call.causal else of_first, along, after, before
        )
        all_grads = (*query_backward.grads, *of_given, *(before.grads if before is not None else ()))
        return [all_grads[place].to(x.dtype) for place, x in zip(places, tensors) if place in wanted]

    def _gradients(
        self,
        grads: list[Tensor],
        saved: list[Tensor],
        wanted: list[int],
        tensors: list[Tensor],
        places: list[int],
        *options: Any,
    ) -> list[Tensor]:
        return [x.new_empty(x.shape) for place, x in zip(places, tensors) if place in wanted]

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
        tensors, *ctx.options = inputs
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:-3], output[-1])
        ctx.save_for_backward(*tensors, *output[1:])

    def _differentiate(self, ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Any]:
        return self.input_gradients(self.backward, ctx, ctx.needs_input_grad[0], grads), *(None,) * len(
            ctx.options
        )

    def input_gradients(
        self,
        backward: Callable[..., list[Tensor]],
        ctx: Any,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of the tensors, None of those not `needed`, by `backward`. ctx: as `_keep` has left it."""
        tensors, saved = split(ctx.saved_tensors, ctx.count)
        places = ctx.options[0]
        wanted = [place for place, is_needed in zip(places, needed) if is_needed]
        q, v = tensors[0], tensors[places.index(self.sizes[0] + 1)]
        outer = given_or_zeros(grads[0], (grads[-3], grads[-2]), q, v, saved[-3:-1])
        found = dict(zip(wanted, backward(outer, list(saved), wanted, list(tensors), *ctx.options)))
        return [found.get(place) for place in places]


class _Direct(torch.autograd.Function):
    """The operator where nobody watches, without what PyTorch does in Python around operators of one's own."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, options: Sequence[Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        # With a `setup_context`, PyTorch would inspect this function's signature at every call.
        ctx.operator, output = operator, tuple(operator._forward(list(tensors), *options))
        operator._keep(ctx, (tensors, *options), output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator = ctx.operator
        return None, None, *operator.input_gradients(operator._backward, ctx, ctx.needs_input_grad[2:], grads)


def _is_watched(tensors: list[Tensor]) -> bool:
    """Whether somebody wants to see operators instead of what they do: a compiler, a mode, a kind of tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    return any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in tensors)


def pack(given: Tensors) -> tuple[list[Tensor], list[int]]:
    """The tensors that are there, and their places."""
    there = [(x, place) for place, x in enumerate(given) if x is not None]
    return [x for x, _ in there], [place for _, place in there]
