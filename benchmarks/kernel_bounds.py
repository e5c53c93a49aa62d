"""Lower bounds of the kernels' time on an H200, from their machine code; no GPU is needed.

    python -m benchmarks.kernel_bounds --out benchmarks/results/kernel_bounds.md
    python -m benchmarks.kernel_bounds --only "elu d=128" --json

A case's launches are recorded and compiled for sm_90, and their machine code is disassembled. Its loops, the trip
counts of the `for` statements that they come from (`TRIPS`) and the grid give lower bounds of a launch's time, each for
the busiest SM:

    issue    warp instructions, 4 a clock
    tensor   FLOPs of mma instructions at the rate of their kind; mma.sync has 63 % of wgmma's
    special  exp2, reciprocals, ...: 16 lanes a clock
    integer  integer arithmetic, comparisons and packing: 64 lanes a clock
    shared   bytes to and from shared memory, operands of wgmma included, 128 a clock; a clock for each shuffle
    memory   every tensor of the launch once, at 4.8 TB/s

The largest is the launch's bound. Units do not overlap as perfectly as it assumes: times are some 1.5 to 2 times the
bound, and more where few warps are resident. Cache misses, bank conflicts, latency and torch's work between launches
are not counted; the code of every branch is.
"""

import ast
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import networkx
import torch

from benchmarks.page import page_parser, table, table_row, write_page

PROCESSORS = 132
CLOCK = 1.83e9
BANDWIDTH = 4.8e12
FLOPS = {"HGMMA": 4096, "GTF32": 2048, "HMMA": 2580, "TF32": 1290}
"""FLOPs per processor and clock, by kind of mma: wgmma and mma.sync, of 16-bit numbers and of TF32."""

INTEGER = (
    *("IMAD", "IADD3", "IADD", "LOP3", "SEL", "FSEL", "ISETP", "FSETP", "FMNMX", "IMNMX", "VIMNMX", "PRMT"),
    *("SHF", "LEA", "F2FP", "PLOP3", "FMNMX3"),
)

WORK = ("LDG", "STG", "LDGSTS", "HMMA", "HGMMA", "MUFU")
"""Instructions that an unrolled loop has once for each of the iterations that it does at once."""

UNITS = ("issue", "tensor", "special", "integer", "shared", "memory")
LENGTH = 16384
HEADS = 16


class Instruction(NamedTuple):
    """One instruction of machine code."""

    text: str

    @property
    def name(self) -> str:
        """The name with its suffixes, without the predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def kind(self) -> str:
        """The name without suffixes."""
        return self.name.split(".")[0]

    @property
    def flops(self) -> tuple[str, float]:
        """Kind of mma (a key of FLOPS), and FLOPs of one warp."""
        if match := re.match(r"HGMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)", self.name):
            m, n, k = map(int, match.groups())
            # A warpgroup of four warps shares one product.
            return "GTF32" if "TF32" in self.name else "HGMMA", 2 * m * n * k / 4
        if match := re.match(r"HMMA\.16(\d\d?)(\d+)?", self.name):
            digits = self.name.split(".")[1]
            return "TF32" if "TF32" in self.name else "HMMA", 2 * 16 * 8 * int(digits[3:])
        return "", 0.0

    @property
    def shared(self) -> float:
        """Bytes that one warp moves to or from shared memory."""
        if match := re.match(r"HGMMA\.(?:SP\.)?64x(\d+)x\d+", self.name):
            # The right operand, and the left one unless it is in registers; 32 bytes of each row at a time.
            left = 0 if re.search(r"\bR\d+, R\d+, gdesc", self.text) else 64
            return (int(match[1]) + left) * 32 / 4
        if self.kind in ("LDSM", "STSM"):
            return 128.0 * (int(self.name[-1]) if self.name[-1] in "24" else 1)
        if self.kind in ("LDS", "STS", "LDGSTS"):
            return 512.0 if ".128" in self.name else 256.0 if ".64" in self.name else 128.0
        return 0.0

    @property
    def clocks(self) -> dict[str, float]:
        """Clocks that one warp occupies each unit of a processor."""
        kind, work = self.flops
        # IMAD.MOV goes through another pipe.
        uses_alu = self.kind in INTEGER and not self.name.startswith("IMAD.MOV")
        return {
            "issue": 1 / 4,
            "tensor": work / FLOPS[kind] if work else 0.0,
            "special": 2.0 * (self.kind == "MUFU"),
            "integer": uses_alu / 2,
            "shared": self.shared / 128 + (self.kind == "SHFL"),
        }


class Code:
    """The machine code of a kernel and its loops, from a disassembly with source lines."""

    def __init__(self, listing: str):
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.lines: list[tuple[str, int]] = []
        line_of_source = ("", 0)
        for line in listing.splitlines():
            if match := re.match(r"\s*(\.L_x_\d+):", line):
                self.labels[match[1]] = len(self.instructions)
            elif match := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
                line_of_source = (match[1], int(match[2]))
            elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                self.instructions.append(Instruction(match[1]))
                self.lines.append(line_of_source)
        graph = networkx.DiGraph((i, j) for i in range(len(self.instructions)) for j in self._successors(i))
        graph.add_node(0)
        self.graph = graph.subgraph({0} | networkx.descendants(graph, 0)).copy()
        """Control flow graph of the reachable instructions."""
        self.loops = sorted(self._natural_loops(), key=lambda body: (min(body), -len(body)))

    def execution_counts(self, trips: Callable[[str], float | None]) -> dict[int, float]:
        """Reachable instruction -> how often it runs.

        trips: the iterable of a `for` statement, as text, -> its trip count; None if the compiler makes no loop of it.
        """
        counts = dict.fromkeys(self.graph, 1.0)
        assigned: list[tuple[set[int], str]] = []
        for body in sorted(self.loops, key=len):
            inner = [(other, text) for other, text in assigned if other < body]
            direct = body.difference(*(other for other, _ in inner))
            # Most instructions of a loop are in the body of its statement; of equals, the innermost statement wins.
            votes: Counter[str] = Counter()
            for i in sorted(direct):
                votes.update(_iterables_around(*self.lines[i]))
            known = {text for _, text in inner}
            candidates = [text for text in reversed(votes) if text not in known and trips(text) is not None]
            if not candidates:
                raise ValueError(
                    f"no for statement for the loop at instruction {min(body)}; look at the listing"
                )
            assigned.append((body, max(candidates, key=lambda text: votes[text])))
        for body, text in assigned:
            twins = [other for other, statement in assigned if statement == text and not other & body]
            share = min([self._unrolled_share(body, other) for other in twins], default=1.0)
            for i in body:
                counts[i] *= (trips(text) or 0.0) * share
        return counts

    def _unrolled_share(self, body: set[int], other: set[int]) -> float:
        """Iterations of a loop per iteration of its statement, if the compiler has unrolled that into two loops.

        The unrolled loop does several iterations at once, so it has that many times the loads, stores and products of
        the other one, which does the remaining iterations: none, for a lower bound.
        """
        work, other_work = (
            Counter(kind for i in x if (kind := self.instructions[i].kind) in WORK) for x in (body, other)
        )
        if work.keys() != other_work.keys() or not work:
            return 1.0
        ratios = {work[kind] / other_work[kind] for kind in work}
        ratio = ratios.pop()
        if ratios or ratio == 1:
            return 1.0
        return 1 / ratio if ratio > 1 and ratio.is_integer() else float(not (1 / ratio).is_integer())

    def _successors(self, i: int) -> list[int]:
        """The possible successors of an instruction; calls are not followed."""
        instruction = self.instructions[i]
        kind, text = instruction.kind, instruction.text
        always = not text.startswith("@")
        following = [i + 1] if i + 1 < len(self.instructions) else []
        if kind == "BRA" and (match := re.search(r"\.L_x_\d+", text)):
            target = [
                j for j in [self.labels.get(match[0], len(self.instructions))] if j < len(self.instructions)
            ]
            # `BRA UP0, label` is conditional without a predicate in front.
            is_jump = always and text.split(None, 1)[1].startswith(("`(", ".L_x", "(")) and ".DIV" not in text
            return target if is_jump else target + following
        return [] if always and kind in ("EXIT", "RET", "BRA", "BRX", "KILL") else following

    def _natural_loops(self) -> Iterator[set[int]]:
        """Bodies of natural loops. Dominators find them where the compiler moves rare code past the end and back."""
        before = networkx.immediate_dominators(self.graph, 0)
        bodies: dict[int, set[int]] = {}
        for head in [i for i in self.graph if i == 0 or self.graph.in_degree(i) > 1]:
            rest = self.graph.copy()
            rest.remove_node(head)
            for tail in self.graph.predecessors(head):
                above: int | None = tail
                while above not in (head, 0, None):
                    above = before[above]
                if above == head:
                    body = {tail} | (networkx.ancestors(rest, tail) if tail != head else set())
                    bodies.setdefault(head, {head}).update(body)
        return (body for body in bodies.values() if not self._is_wait_loop(body))

    def _is_wait_loop(self, body: set[int]) -> bool:
        """Whether a loop only polls a barrier, or is the branch to itself at the end of the code."""
        polls = any(self.instructions[i].kind in ("SYNCS", "NANOSLEEP") for i in body)
        return len(body) < 3 or (len(body) < 16 and polls)


@cache
def _for_loops(file: str) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and iterable of each `for` statement of a file.

    `tl.range` reads as `range` without options: how the compiler pipelines a loop does not change its trips.
    """
    tree = ast.parse(Path(file).read_text()) if file.endswith(".py") else ast.Module([], [])
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for node in loops:
        if isinstance(node.iter, ast.Call) and ast.unparse(node.iter.func) == "tl.range":
            node.iter = ast.Call(ast.Name("range"), node.iter.args, [])
    return tuple((node.lineno, node.end_lineno or node.lineno, ast.unparse(node.iter)) for node in loops)


def _iterables_around(file: str, line: int) -> list[str]:
    """The iterables of the `for` statements around a line."""
    return [text for first, last, text in _for_loops(file) if first <= line <= last and "static" not in text]


Sizes = Any
"""The compile-time arguments of a launch (TILING, NEAR, PHI, ...), see the kernels' arguments."""


def _key_blocks_per_query_tile(x: Sizes) -> float:
    """Key blocks of a segment that a query tile visits, averaged over the segment's tiles."""
    if not x.TILING.rank:
        return (x.TILING.segment + x.TILING.chunk) / 2 / x.TILING.block
    ends = range(x.TILING.chunk, x.TILING.segment + 1, x.TILING.chunk)
    met = [math.ceil((end - 1) // x.TILING.block_size * x.TILING.rank / x.TILING.block) for end in ends]
    return sum(met) / len(met)


def _query_blocks_per_key_tile(x: Sizes) -> float:
    """Query blocks of a segment that a key tile visits, likewise."""
    tokens = x.TILING.chunk // x.TILING.rank * x.TILING.block_size if x.TILING.rank else x.TILING.chunk
    return (x.TILING.segment + tokens) / 2 / x.TILING.block


def _window_blocks(x: Sizes) -> float:
    """Blocks that a tile visits through local windows."""
    reach = (x.NEAR.blocks - 1) * x.NEAR.block_size + max(x.TILING.chunk, x.NEAR.block_size)
    return reach / x.TILING.block


def _chunks(_: Sizes) -> float:
    """Chunks of the gated delta rule; imported late, see `cases`."""
    from megakernel.ops.gated_delta_rule.kernels import CHUNK

    return LENGTH / CHUNK


TRIPS: dict[str, Callable[[Sizes], float | None]] = {
    "range(0, PHI.padded_width, PHI.columns)": lambda x: x.PHI.padded_width / x.PHI.columns,
    "range(begin, stop, STEP)": lambda x: x.META.span / x.META.tokens_at_once,
    "range(begin, end, C)": lambda x: max(1.0, x.TILING.span / x.TILING.chunk),
    "range(begin, stop, C)": lambda x: x.TILING.segment / x.TILING.chunk,
    "range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK)": _key_blocks_per_query_tile,
    "range(token_of(at, TILING), tl.minimum(stop, seq.queries), BQ)": _query_blocks_per_key_tile,
    "range(oldest, tile.stop, BK)": _window_blocks,
    "range(G * steps)": lambda x: x.TILING.group * _window_blocks(x),
    "range(tl.maximum(nearest, 0) // B, tl.minimum((nearest + C + B - 2) // B + 1, blocks))": (
        lambda x: 1 + x.TILING.chunk / x.NEAR.block_size
    ),
    "range(part * EACH, tl.minimum(part * EACH + EACH, blocks))": lambda x: x.EACH,
    "range(G)": lambda x: x.TILING.group if x.TILING.group > 1 else None,
    "range(segments)": lambda x: LENGTH / x.SEGMENT,
    "range(chunks)": _chunks,
    "range(0, SHAPE.values, V)": lambda x: x.SHAPE.values / x.SHAPE.columns,
    "range(SHAPE.group)": lambda x: x.SHAPE.group if x.SHAPE.group > 1 else None,
}
"""Iterable of a kernel's `for` statement -> its trip count for a sequence of LENGTH tokens."""


LAST_OF_FORWARD = ("read", "merge", "convolve")
"""The kernels that write outputs."""


class Bound(NamedTuple):
    """Lower bounds of a launch's time."""

    kernel: str
    backward: bool
    programs: int
    warps: int
    registers: int
    spilled: int
    """Bytes per thread."""

    milliseconds: dict[str, float]
    """Lower bound by unit."""

    @property
    def unit(self) -> str:
        """The unit that limits the launch."""
        return max(self.milliseconds, key=lambda unit: self.milliseconds[unit])

    @property
    def largest(self) -> float:
        """The launch's bound in ms."""
        return self.milliseconds[self.unit]


def bound_of(launch: Any, backward: bool) -> Bound:
    """Compile a launch and compute its bounds."""
    from triton import knobs

    from benchmarks.kernel_compiling import compile_kernel, resources, run_on_cubin

    kernel = compile_kernel(launch, 90)
    used = resources(kernel)
    code = Code(run_on_cubin(kernel, knobs.nvidia.nvdisasm.path, "-c", "-g"))
    sizes = SimpleNamespace(**launch.options)
    clocks = dict.fromkeys(UNITS[:-1], 0.0)
    for index, count in code.execution_counts(lambda text: TRIPS[text](sizes)).items():
        for unit, clocks_per_warp in code.instructions[index].clocks.items():
            clocks[unit] += count * clocks_per_warp
    programs = math.prod(launch.grid)
    share = math.ceil(programs / PROCESSORS) * launch.warps / CLOCK * 1e3
    milliseconds = {unit: each * share for unit, each in clocks.items()}
    milliseconds["memory"] = _bytes(launch) / BANDWIDTH * 1e3
    name = launch.kernel.__name__
    return Bound(name, backward, programs, launch.warps, used.registers, used.spilled, milliseconds)


def _bytes(launch: Any) -> int:
    """Bytes of every tensor once; `pass_states` reads and writes the states, its largest tensor, in place."""
    sizes: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sizes[value.data_ptr()] = value.numel() * value.element_size()
        elif isinstance(value, tuple):
            for part in value:
                add(part)

    add(launch.arguments)
    if launch.kernel.__name__ == "pass_states":
        return sum(sizes.values()) + max(sizes.values())
    return sum(sizes.values())


def cases() -> dict[str, Callable[[], None]]:
    """Name -> a call of an op, forward and backward. Imported late: TRITON_INTERPRET must be unset before triton."""
    from benchmarks.kernel_cases import convolution_case, decaying_case, flurka_case, kernel_attention_case
    from megakernel.ops.gated_delta_rule import gated_delta_rule
    from megakernel.ops.simple_gla import simple_gla

    case = partial(partial, kernel_attention_case, length=LENGTH, heads=HEADS)
    flurka = partial(partial, flurka_case, "hedgehog", blocks=2, length=LENGTH, heads=HEADS)
    decaying = partial(partial, decaying_case, length=LENGTH, heads=HEADS)
    maps = ("elu", "hedgehog", "favor")
    convolution = partial(partial, convolution_case, width=4, packed=True, length=LENGTH, heads=HEADS)
    variants: dict[str, dict[str, bool]] = {"": {}, ", packed": {"packed": True}, ", decay": {"decays": True}}
    return {
        **{f"kernel_attention {name} d={width}": case(name, width) for name in maps for width in (64, 128)},
        **{f"kernel_attention elu, packed d={width}": case("elu", width, packed=True) for width in (64, 128)},
        **{
            f"flurka hedgehog gated, 2 blocks{variant}, d={width}": flurka(width, **options)
            for variant, options in variants.items()
            for width in (64, 128)
        },
        **{f"simple_gla d={width}": decaying(simple_gla, width) for width in (64, 128)},
        **{f"gated_delta_rule d={width}": decaying(gated_delta_rule, width) for width in (64, 128)},
        **{f"short convolution, 4 taps, packed d={width}": convolution(width) for width in (64, 128)},
    }


def bounds(case: Callable[[], None]) -> list[Bound]:
    """The bounds of a case's launches, in order."""
    from megakernel.ops.kernels.launch import record_launches

    with record_launches() as launches:
        case()
    last = next(i for i, launch in enumerate(launches) if launch.kernel.__name__ in LAST_OF_FORWARD)
    return [bound_of(launch, index > last) for index, launch in enumerate(launches)]


def total_bounds(bounds: list[Bound]) -> tuple[float, float]:
    """Bounds of forward, and of forward and backward, in ms."""
    return sum(x.largest for x in bounds if not x.backward), sum(x.largest for x in bounds)


def page(results: dict[str, list[Bound]]) -> str:
    """The text of the page."""
    import triton

    from megakernel.ops.kernels.assembler import RELEASE, dotted

    lines = [
        "# What the compiled kernels would take at best",
        "",
        f"`python -m benchmarks.kernel_bounds`, triton {triton.__version__}, ptxas {dotted(RELEASE)}, compiled for "
        f"sm_90: lower bounds for an H200, no times. One sequence of {LENGTH:,} tokens, {HEADS} heads, bfloat16. The "
        "module says what is counted.",
        "",
    ]
    rows = (
        table_row([name, *(f"{bound:.3f}" for bound in total_bounds(launches))])
        for name, launches in results.items()
    )
    lines += [*table(("case", "forward, ms", "forward and backward, ms"), rows), "By launch, ms:", ""]
    header = ("case", "launch", "programs", "warps", "registers", "spilled bytes", "binds", *UNITS)
    by_launch = []
    for name, launches in results.items():
        for x in launches:
            sizes = (x.programs, x.warps, x.registers, x.spilled, x.unit)
            numbers = (f"{x.milliseconds[unit]:.3f}" for unit in UNITS)
            launch = f"{x.kernel}, backward" if x.backward else x.kernel
            by_launch.append(table_row([name, launch, *sizes, *numbers]))
    return "\n".join([*lines, *table(header, by_launch)])


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each case")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    # Machine code in Triton's cache names the source files of whichever checkout compiled it.
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    results = {}
    for name, case in cases().items():
        if arguments.only in name:
            results[name] = bounds(case)
            forward, both = total_bounds(results[name])
            print(
                f"{name}: {forward:.3f} ms forward, {both:.3f} ms with backward", file=sys.stderr, flush=True
            )
            if arguments.json:
                launches = [{**x._asdict(), "binds": x.unit} for x in results[name]]
                line = {"case": name, "forward": forward, "both": both, "launches": launches}
                print(json.dumps(line), flush=True)
    if not arguments.json:
        write_page(page(results), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
