"""torch.compile of the transformer layers' bodies (`training.compile: layer`).

All layers share one compiled function: a layer whose parts and shapes are those of an earlier one runs its graph, on
its own weights. Graphs have fixed shapes, so each sequence length has its own.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megakernel.config import Attention, UserError

MOST_GRAPHS = 1024
"""Graphs of the layers' body after which torch ends with an error; without a limit of our own, after 8."""

BodyOf = Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
"""(layer, hidden states, positions, numbers for dropout) -> hidden states."""


class Graphs:
    """What this process has compiled."""

    def __init__(self) -> None:
        self.count = 0
        """Graphs so far."""

        self.seconds = 0.0
        """Seconds that the compiler took for them, without tracing."""

        self._told = 0

    def compile(self, graph: Any, inputs: Any) -> Any:
        """A backend of torch.compile: Inductor."""
        from torch._inductor.compile_fx import compile_fx

        start = time.perf_counter()
        compiled = compile_fx(graph, inputs)
        self.count += 1
        self.seconds += time.perf_counter() - start
        return compiled

    def new(self) -> str:
        """What was compiled since the last call, in words; empty if nothing was."""
        if self.count == self._told:
            return ""
        new, self._told = self.count - self._told, self.count
        return f"{new} graph{'s' * (new != 1)} of layers compiled, {self.seconds:.0f} s so far"


GRAPHS = Graphs()


@cache
def compiled(body: BodyOf, whole: bool) -> BodyOf:
    """`body` under torch.compile. whole: as one graph, so that a part that torch cannot trace is an error."""
    options: dict[str, Any] = {"fullgraph": whole, "dynamic": False, "recompile_limit": MOST_GRAPHS}
    return torch.compile(body, backend=GRAPHS.compile, **options)


@cache
def uncompiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, which runs as it is where a compiled one calls it, and so breaks its graph in two."""
    return torch.compiler.disable(function)


def outside_graphs(attention: Attention, context_ranks: int) -> str | None:
    """Why a layer's attention runs outside of its graph; None: the graph has it."""
    return "it exchanges states with other context ranks" if context_ranks > 1 else attention.outside_graphs


def has_hooks(layer: nn.Module) -> bool:
    """Whether a part of the layer has hooks, which compiled graphs leave out silently; its own run outside of them."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in layer.modules()
        if module is not layer
    )


def check_compiler(device: torch.device) -> None:
    """Raise UserError if layers cannot be compiled for the device: Inductor writes C++ for CPUs."""
    if device.type != "cpu":
        return
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise UserError(
            "training.compile=layer needs a C++ compiler on a CPU, and there is none; install one (apt-get install "
            "g++), name it in the variable CXX, or set training.compile=none"
        ) from None
