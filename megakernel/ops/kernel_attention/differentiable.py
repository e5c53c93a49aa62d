"""An op's launches on whole rows as operators of PyTorch, which differentiates and compiles around them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention.arguments import State
from megakernel.ops.kernel_attention.exchanged import MATRIX, Launches, Slopes, split
from megakernel.ops.kernel_attention.launches import given_or_zeros, gradient_of_first, gradient_of_last

Make = Callable[[Sequence[Any], Tensor, Tensors], Launches]
"""(values of the options, queries, what is given of keys) -> launches."""

TYPES = {str: "str", int: "SymInt", bool: "bool"}
"""Python's types -> those of operators."""


class Operator:
    """A function of tensors (those of queries, of keys, and a first state, any of them None) and `options`.

    It gives what `Launches.read` found, what `write` kept, the states that enter segments, and the last state.
    Operators take no lists with None in them: they get the tensors that are there, and the places of these.
    """

    def __init__(self, name: str, options: Mapping[str, type], make: Make, queries: int, keys: int):
        self.make, self.sizes = make, (queries, keys, 3)
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

    def __call__(self, given: Tensors, *options: Any) -> list[Tensor]:
        """The outputs of the operator."""
        return self.forward(*pack(given), *options)

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
        call, row = launches.call, launches.row
        room, kept = launches.write()
        entering, last = call.pass_on(room, first, row.starts, row.length, reverse=False)
        found = launches.read(queries, kept, entering if call.causal else last)
        if not call.causal:
            entering = call.sums_of_segments(keys[0], 0)
        return [*found, *kept, *entering, *last]

    def _outputs(self, tensors: list[Tensor], places: list[int], *options: Any) -> list[Tensor]:
        launches, queries, keys, _ = self._launches(tensors, places, options)
        call = launches.call
        room = call.sums_of_segments(keys[0], launches.row.length if call.causal else 0)
        return [*launches.found(queries), *launches.kept(), *room, *call.states(keys[0], -1)]

    def _backward(
        self,
        grads: list[Tensor],
        kept: list[Tensor],
        wanted: list[int],
        tensors: list[Tensor],
        places: list[int],
        *options: Any,
    ) -> list[Tensor]:
        """Gradients of the tensors at the places `wanted`. grads: of the output, and the last sums and normalizers."""
        launches, queries, keys, first = self._launches(tensors, places, options)
        call, row = launches.call, launches.row
        found, of_keys, state, left = split(
            kept, len(kept) - 6 - len(launches.kept()), len(launches.kept()), 3
        )
        last, length = State(*left), row.length if call.causal else row.queries
        entering = State(*state) if call.causal else last
        learned = self.sizes[0] + MATRIX in wanted
        behind = launches.bwd_read(grads[0], queries, found, of_keys, entering, learned)
        outer = gradient_of_last(grads[1], grads[2], last.logs)
        room = call.sums_of_queries(behind.queries, row, keys[0], length)
        of_segments, of_first = call.pass_on(room, outer, row.starts, length, reverse=True)
        before = None if first is None else Slopes(first, gradient_of_first(first.logs, of_first))
        after = Slopes(last, outer[:2])
        of_given = launches.bwd_write(
            behind, of_keys, of_segments if call.causal else of_first, after, before
        )
        all_grads = (*behind.grads, *of_given, *(before.grads if before is not None else ()))
        return [all_grads[place].to(x.dtype) for place, x in zip(places, tensors) if place in wanted]

    def _gradients(
        self,
        grads: list[Tensor],
        kept: list[Tensor],
        wanted: list[int],
        tensors: list[Tensor],
        places: list[int],
        *options: Any,
    ) -> list[Tensor]:
        return [x.new_empty(x.shape) for place, x in zip(places, tensors) if place in wanted]

    def _keep(self, ctx: Any, inputs: Tensors, output: list[Tensor]) -> None:
        tensors, *ctx.options = inputs
        ctx.count = len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:-3], output[-1])
        ctx.save_for_backward(*tensors, *output[1:])

    def _differentiate(self, ctx: Any, grads: list[Tensor | None]) -> Tensors:
        tensors, kept = split(ctx.saved_tensors, ctx.count)
        places = ctx.options[0]
        wanted = [place for place, needed in zip(places, ctx.needs_input_grad[0]) if needed]
        q, v = tensors[0], tensors[places.index(self.sizes[0] + 1)]
        outer = given_or_zeros((grads[0], grads[-3], grads[-2]), q, v, *kept[-3:-1])
        found = self.backward(list(outer), list(kept), wanted, list(tensors), *ctx.options)
        by_place = dict(zip(wanted, found))
        return [by_place.get(place) for place in places], *(None,) * len(ctx.options)


def pack(given: Tensors) -> tuple[list[Tensor], list[int]]:
    """The tensors that are there, and their places."""
    there = [(x, place) for place, x in enumerate(given) if x is not None]
    return [x for x, _ in there], [place for _, place in there]
