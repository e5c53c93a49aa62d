"""Host overhead of a layer's kernels: torch operations, launches, compiled variants, CPU time.

    OMP_NUM_THREADS=1 python -m benchmarks.kernels.host --out benchmarks/results/kernel_host.md

A layer is a mechanism with heads of 128 in bfloat16, from q, k and v to its output and back, on two documents packed
into a sequence, as in training. The first layer of a micro-batch makes tables of the positions that all others share;
they are counted separately. Launches are recorded instead of made, so no GPU is needed. Operations are those of torch
that start work, also inside the kernels' operators: not views and not tensors without contents. A variant is one
compilation of a kernel, for its compile-time values, types and divisibilities. Time is CPU time of one thread for one
head and SHORT_TOKENS tokens, where torch's operations have little to compute. Starting a kernel comes on top: of that,
the page has how long Triton takes to bind the arguments and to find the compiled kernel by them, which needs no GPU
either, and how many arguments a kernel has, tuples as their parts; what it then hands to the driver is not counted.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature

from benchmarks.page import page_header, page_parser, table, table_row, write_page
from megakernel.attention import Rotary, build
from megakernel.attention.inputs import AttentionInputs
from megakernel.ops.kernels.launch import DEFAULT_CAPABILITY, Launch, record_launches

HEADS, HEAD_DIM = 16, 128
LAYERS: dict[str, dict[str, Any]] = {
    "elu": {"preset": "linear"},
    "hedgehog": {"preset": "hedgehog"},
    "favor": {"preset": "performer", "feature_map": {"samples": HEAD_DIM}},
    "FLuRKA": {"preset": "flurka"},
}
SHORT_TOKENS = 128
LENGTHS = tuple(2**exponent for exponent in range(9, 18))
REPEATS = 40

VIEWS = (
    "view _unsafe_view _reshape_alias reshape alias as_strided expand expand_as view_as unsqueeze squeeze slice select "
    "narrow transpose permute movedim t numpy_T chunk split split_with_sizes unbind flatten unflatten detach lift_fresh"
)
WITHOUT_CONTENTS = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided set_ resize_"
CHECKS = "to contiguous resolve_conj resolve_neg promote_types result_type"
WITHOUT_WORK = {*VIEWS.split(), *WITHOUT_CONTENTS.split(), *CHECKS.split()}
"""Operations that start nothing on a GPU: views, tensors without contents, casts and copies that may be no-ops."""


class OperationCounts(NamedTuple):
    """Counts of a layer's forward or backward."""

    operations: int
    launches: int


class HostCosts(NamedTuple):
    """Host overhead of a layer."""

    table_operations: int
    """Extra operations of the first layer, for the tables that all layers share."""

    forward: OperationCounts
    backward: OperationCounts
    milliseconds: float
    """Forward and backward."""


def _count(run: Callable[[], Any], launches: list[Launch]) -> tuple[Any, OperationCounts]:
    """The result of `run`, and counts of its innermost torch operations and of launches."""
    launches.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        out = run()
    outermost = (event for event in profiler.events() if event.cpu_parent is None)
    return out, OperationCounts(sum(len(_working_operations(event)) for event in outermost), len(launches))


def _working_operations(event: Any) -> list[str]:
    """Names of an event's innermost operations that start work."""
    inner = [name for child in event.cpu_children for name in _working_operations(child)]
    name = event.name.removeprefix("aten::")
    return inner or [name] * (event.name.startswith("aten::") and name not in WITHOUT_WORK)


class Layer(NamedTuple):
    """A layer on one sequence; q, k and v have no contents."""

    forward: Callable[[], Tensor]
    positions: Tensor
    inputs: list[Tensor]
    """What gradients are taken of: q, k, v and the layer's parameters."""

    def backward(self, out: Tensor) -> None:
        """Backward without accumulating gradients into `.grad`."""
        torch.autograd.grad(out, self.inputs, torch.empty_like(out))


def build_layer(name: str, tokens: int, heads: int = HEADS) -> Layer:
    """The layer of this name; FLuRKA has rotary embeddings in its windows."""
    core = build(LAYERS[name], num_heads=heads, head_dim=HEAD_DIM).to(torch.bfloat16)
    shape = (1, heads, tokens, HEAD_DIM)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    positions = torch.arange(tokens // 2).repeat(2)[None]
    inputs = AttentionInputs(positions, rotary=Rotary(HEAD_DIM) if name == "FLuRKA" else None)
    return Layer(partial(core, q, k, v, inputs), positions, [q, k, v, *core.parameters()])


def measure_layer(name: str, repeats: int = REPEATS) -> HostCosts:
    """Measure a layer's counts and time."""
    layer = build_layer(name, SHORT_TOKENS, heads=1)
    with record_launches() as launches:
        layer.backward(layer.forward())  # warm-up
        layer.positions.add_(0)  # changes their version, so that the tables are made again
        _, first = _count(layer.forward, launches)
        out, forward = _count(layer.forward, launches)
        _, backward = _count(lambda: layer.backward(out), launches)
        spent = []
        for _ in range(repeats):
            launches.clear()
            start = time.process_time()
            layer.backward(layer.forward())
            spent.append(time.process_time() - start)
    table_operations = first.operations - forward.operations
    return HostCosts(table_operations, forward, backward, statistics.median(spent) * 1e3)


def variants(name: str) -> Mapping[str, int]:
    """Kernel -> number of variants compiled for a layer at all LENGTHS."""
    from benchmarks.kernels.compiling import fingerprint

    compiled: dict[str, set[str]] = defaultdict(set)
    for tokens in LENGTHS:
        layer = build_layer(name, tokens)
        with record_launches() as launches:
            layer.backward(layer.forward())
        for launch in launches:
            compiled[launch.kernel.__name__].add(fingerprint(launch, DEFAULT_CAPABILITY))
    return {kernel: len(prints) for kernel, prints in compiled.items()}


class Binding(NamedTuple):
    """What Triton does with the arguments of a layer's launches."""

    arguments: Mapping[str, int]
    """Kernel -> arguments, tuples as their parts."""

    microseconds: float
    """To bind all of a layer's, forward and backward, and to find the compiled kernels."""


def measure_binding(name: str, repeats: int = REPEATS) -> Binding:
    """Measure a layer's launches on SHORT_TOKENS tokens with the functions that Triton itself launches with."""
    target = make_backend(GPUTarget("cuda", DEFAULT_CAPABILITY, 32))
    layer = build_layer(name, SHORT_TOKENS, heads=1)
    with record_launches() as launches:
        layer.backward(layer.forward())
    calls: list[Callable[[], Any]] = []
    for launch in launches:
        kernel = launch.kernel
        binder = create_function_from_signature(kernel.signature, kernel.params, target)
        calls.append(partial(_bind, binder, {}, launch))
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        for call in calls:
            call()
        spent.append(time.process_time() - start)
    counts = {launch.kernel.__name__: _count_arguments(launch.arguments) for launch in launches}
    return Binding(counts, statistics.median(spent) * 1e6)


def _bind(binder: Callable[..., Any], keys: dict[Any, Any], launch: Launch) -> Any:
    """What `JITFunction.run` does before it looks for the compiled kernel, and the key that it looks for."""
    how = {"num_warps": launch.warps, "num_stages": launch.stages, "debug": False, "instrumentation_mode": ""}
    _, specialization, options = binder(*launch.arguments, **launch.options, **how)
    return compute_cache_key(keys, specialization, options)


def _count_arguments(arguments: tuple[Any, ...]) -> int:
    return sum(_count_arguments(x) if isinstance(x, tuple) else 1 for x in arguments)


def page() -> str:
    """The page with its tables."""
    all_costs = {name: measure_layer(name) for name in LAYERS}
    compiled = {name: variants(name) for name in LAYERS}
    bound = {name: measure_binding(name) for name in LAYERS}
    return "\n".join(
        [
            *page_header("What the host does around the kernels", "python -m benchmarks.kernels.host"),
            "The module says what is counted. Time is the median of "
            f"{REPEATS} passes over {SHORT_TOKENS} tokens, forward and backward.",
            "",
            *table(
                (
                    *("layer", "operations forward", "backward", "launches forward", "backward"),
                    *("operations of the first layer alone", "host ms"),
                ),
                (
                    f"| {name} | {costs.forward.operations} | {costs.backward.operations} | {costs.forward.launches} "
                    f"| {costs.backward.launches} | {costs.table_operations} | {costs.milliseconds:.2f} |"
                    for name, costs in all_costs.items()
                ),
            ),
            f"Variants that Triton compiles over {LENGTHS[0]:,}, {LENGTHS[1]:,}, ... {LENGTHS[-1]:,} tokens:",
            "",
            *table(
                ("layer", "variants of each kernel"),
                (table_row([name, _named(kernels)]) for name, kernels in compiled.items()),
            ),
            "Arguments that Triton binds, and how long it takes for all launches of a layer:",
            "",
            *table(
                ("layer", "arguments of each kernel", "microseconds"),
                (
                    table_row([name, _named(binding.arguments), f"{binding.microseconds:.0f}"])
                    for name, binding in bound.items()
                ),
            ),
        ]
    )


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kernel} {count}" for kernel, count in counts.items())


def main() -> None:
    parser = page_parser(__doc__)
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    write_page(page(), arguments.out)


if __name__ == "__main__":
    main()
