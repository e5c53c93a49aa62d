"""What the host does around the kernels of a layer: torch operations, launches, compiled variants, Python's time.

    OMP_NUM_THREADS=1 python -m benchmarks.kernel_host --out benchmarks/results/kernel_host.md

A layer is a mechanism with heads of 128 in bfloat16, from q, k and v to its output and back, on two documents packed
into a sequence, as training has them; what the first layer of a micro-batch makes of their places all others share, and
it is counted by itself. Launches are noted down instead of made, so no GPU is needed. Operations are those of torch
that run something, inside of the kernels' operators too: not views and not tensors without contents. A variant is what
Triton compiles for a launch: the same kernel with other compile-time numbers, types or divisibilities. Time is the
processor time of one thread for one head and SHORT tokens, on which torch's operations have little to compute; starting
a kernel comes on top.
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

from benchmarks.page import add_out, give, opening, table, table_row, whole_help
from megakernel.attention import Rotary, build
from megakernel.attention.inputs import AttentionInputs
from megakernel.ops.kernels.launch import LATEST, Launch, noting

HEADS, HEAD_DIM = 16, 128
LAYERS: dict[str, dict[str, Any]] = {
    "elu": {"preset": "linear"},
    "hedgehog": {"preset": "hedgehog"},
    "favor": {"preset": "performer", "feature_map": {"samples": HEAD_DIM}},
    "FLuRKA": {"preset": "flurka"},
}
SHORT = 128
LENGTHS = tuple(2**exponent for exponent in range(9, 18))
REPEATS = 40

VIEWS = (
    "view _unsafe_view _reshape_alias reshape alias as_strided expand expand_as view_as unsqueeze squeeze slice select "
    "narrow transpose permute movedim t numpy_T chunk split split_with_sizes unbind flatten unflatten detach lift_fresh"
)
WITHOUT_CONTENTS = "empty empty_like empty_strided new_empty new_empty_strided set_ resize_"
CHECKS = "to contiguous resolve_conj resolve_neg promote_types result_type"
WITHOUT_WORK = {*VIEWS.split(), *WITHOUT_CONTENTS.split(), *CHECKS.split()}
"""Operations that start nothing on a GPU by themselves: views, tensors without contents, casts to what a tensor is."""


class Counts(NamedTuple):
    """Of one way through a layer."""

    operations: int
    launches: int


class Host(NamedTuple):
    """What the host does for a layer."""

    tables: int
    """Operations of the first layer beyond those of others."""

    forward: Counts
    backward: Counts
    milliseconds: float
    """Forward and backward."""


def _counted(run: Callable[[], Any], launches: list[Launch]) -> tuple[Any, Counts]:
    """What it returns, and counts of what torch runs in it: of operations that call others, the innermost."""
    launches.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        out = run()
    outermost = (event for event in profiler.events() if event.cpu_parent is None)
    return out, Counts(sum(len(_working(event)) for event in outermost), len(launches))


def _working(event: Any) -> list[str]:
    """The names of the innermost operations of an event that start something."""
    inner = [name for child in event.cpu_children for name in _working(child)]
    name = event.name.removeprefix("aten::")
    return inner or [name] * (event.name.startswith("aten::") and name not in WITHOUT_WORK)


class Layer(NamedTuple):
    """A layer on one sequence; q, k and v are never computed on."""

    forward: Callable[[], Tensor]
    positions: Tensor
    inputs: list[Tensor]
    """What it is differentiated by: q, k, v and its parameters."""

    def backward(self, out: Tensor) -> None:
        """Without what adds gradients up over micro-batches."""
        torch.autograd.grad(out, self.inputs, torch.empty_like(out))


def layer(name: str, tokens: int, heads: int = HEADS) -> Layer:
    """The layer of this name; FLuRKA's windows rotate queries and keys."""
    core = build(LAYERS[name], num_heads=heads, head_dim=HEAD_DIM).to(torch.bfloat16)
    shape = (1, heads, tokens, HEAD_DIM)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    positions = torch.arange(tokens // 2).repeat(2)[None]
    inputs = AttentionInputs(positions, rotary=Rotary(HEAD_DIM) if name == "FLuRKA" else None)
    return Layer(partial(core, q, k, v, inputs), positions, [q, k, v, *core.parameters()])


def host(name: str, repeats: int = REPEATS) -> Host:
    """Counts and time of a layer."""
    one = layer(name, SHORT, heads=1)
    with noting() as launches:
        one.backward(one.forward())  # what torch and Python do once
        one.positions.add_(0)  # nobody knows that they are the same
        _, first = _counted(one.forward, launches)
        out, there = _counted(one.forward, launches)
        _, back = _counted(lambda: one.backward(out), launches)
        spent = []
        for _ in range(repeats):
            launches.clear()
            start = time.process_time()
            one.backward(one.forward())
            spent.append(time.process_time() - start)
    tables = first.operations - there.operations
    return Host(tables, there, back, statistics.median(spent) * 1e3)


def variants(name: str) -> Mapping[str, int]:
    """Kernel -> what is compiled of it for a layer at all LENGTHS."""
    from benchmarks.kernel_compiling import fingerprint

    compiled: dict[str, set[str]] = defaultdict(set)
    for tokens in LENGTHS:
        one = layer(name, tokens)
        with noting() as launches:
            one.backward(one.forward())
        for launch in launches:
            compiled[launch.kernel.__name__].add(fingerprint(launch, LATEST))
    return {kernel: len(found) for kernel, found in compiled.items()}


def page() -> str:
    """Both tables."""
    found = {name: host(name) for name in LAYERS}
    compiled = {name: variants(name) for name in LAYERS}
    return "\n".join(
        [
            *opening("What the host does around the kernels", "python -m benchmarks.kernel_host"),
            "The module says what is counted. Time is the median of "
            f"{REPEATS} passes over {SHORT} tokens, forward and backward.",
            "",
            *table(
                (
                    "layer",
                    "operations forward",
                    "backward",
                    "launches forward",
                    "backward",
                    "operations of the first layer alone",
                    "host ms",
                ),
                (
                    f"| {name} | {one.forward.operations} | {one.backward.operations} | {one.forward.launches} "
                    f"| {one.backward.launches} | {one.tables} | {one.milliseconds:.2f} |"
                    for name, one in found.items()
                ),
            ),
            f"Variants that Triton compiles over {LENGTHS[0]:,}, {LENGTHS[1]:,}, ... {LENGTHS[-1]:,} tokens:",
            "",
            *table(
                ("layer", "variants of each kernel"),
                (
                    table_row([name, ", ".join(f"{kernel} {count}" for kernel, count in kernels.items())])
                    for name, kernels in compiled.items()
                ),
            ),
        ]
    )


def main() -> None:
    parser = whole_help(__doc__)
    add_out(parser)
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    give(page(), arguments.out)


if __name__ == "__main__":
    main()
