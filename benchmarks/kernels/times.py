"""Times of the kernels on a GPU, launch by launch, with the shipped tile sizes or with others.

    python -m benchmarks.kernels.times --out benchmarks/results/kernel_times.md
    python -m benchmarks.kernels.times --tiles --only "FLuRKA d=128"

One sequence of 16,384 tokens, 16 heads, bfloat16, random inputs; a layer forward and backward, as a model calls it.
The profiler measures each launch; the inputs are not in the GPU's L2. `--tiles` runs every kernel with other tile
sizes: each must give the outputs and gradients of the shipped one within 1 %, the same ones three times. Processes that
tiles crash or hang are started again with the next one. Most of a choice's time is the compilation of its kernel.
"""

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.kernels.attention.cases import Case
from benchmarks.kernels.attention.check import rms_ratio
from benchmarks.kernels.attention.clock import FLUSH_BYTES
from benchmarks.kernels.attention.computation import Computation, computation, random_tensors
from benchmarks.kernels.attention.implementations import ATTENTIONS
from benchmarks.page import page_header, page_parser, table, table_row, write_page

LENGTH = 16384
REPEATS = 7
TOLERANCE = 0.01
PATIENCE = 60
"""Seconds that one choice of tiles may take."""

CASES = {
    f"{name} d={width}": (name, width)
    for width in (128, 64)
    for name in ("kernel elu", "kernel hedgehog", "kernel favor", "FLuRKA", "gated delta rule")
}
"""Name -> implementation and head width."""


CHILD = (sys.executable, "-m", "benchmarks.kernels.times", "--child")


class TileTime(NamedTuple):
    """A kernel with one choice of tile sizes."""

    kernel: str
    tile: list[int]
    """The fields of `launcher.TileSizes`."""

    milliseconds: float | None
    """Of all launches of the kernel in a call; None if it is wrong."""

    problem: str = ""


def case_of(name: str) -> Computation:
    """The computation of a case, on the GPU."""
    implementation, width = CASES[name]
    case, device = Case(1, LENGTH, 16, width), torch.device("cuda")
    return computation(ATTENTIONS[implementation], case, random_tensors(case, device, torch.bfloat16))


def launch_times(run: Callable[[], Any], repeats: int = REPEATS) -> list[tuple[str, float]]:
    """Name and median milliseconds of each kernel that a run launches, ours and others'."""
    from torch.profiler import ProfilerActivity, profile

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(repeats):
            flush.zero_()
            run()
        torch.cuda.synchronize()
    events = sorted(
        (event.start_ns(), event.name(), event.duration_ns() / 1e6)
        for event in profiled.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and not event.name().startswith(("Memset", "Memcpy"))
    )
    return medians([(name, spent) for _, name, spent in events], repeats)


def medians(events: list[tuple[str, float]], repeats: int) -> list[tuple[str, float]]:
    """Kernels of one of `repeats` equal runs with the median of their times; each run begins with the flush."""
    each = len(events) // repeats
    runs = [events[start : start + each] for start in range(0, len(events), each)]
    names = [name for name, _ in runs[0]]
    if any([name for name, _ in run] != names for run in runs):
        raise ValueError("runs differ in their kernels; let nothing else use the GPU")
    return [(name, statistics.median(run[i][1] for run in runs)) for i, name in enumerate(names)][1:]


def candidates(kernel: str) -> list[list[int]]:
    """Tile sizes to try: one warpgroup and at most 64 rows.

    On an H200, 128 rows, two warpgroups, and registers for more programs per multiprocessor spilled and took longer
    (docs/results.md).
    """
    sizes = ((32, 32), (64, 64)) if kernel.startswith("write") else ((64, 32), (64, 64))
    return [[chunk, block, 4, stages] for chunk, block in sizes for stages in (1, 2, 3)]


def tiled_kernels(name: str) -> list[str]:
    """The kernels of a case whose tile sizes are in tables."""
    from megakernel.ops.kernels.launch import record_launches

    with record_launches() as launches:
        case_of(name).train()
    kernels = dict.fromkeys(x.kernel.__name__ for x in launches if "TILING" in x.options)
    return [kernel for kernel in kernels if not kernel.startswith("pool")]


def try_tiles(name: str, todo: list[tuple[str, list[int]]]) -> Iterator[TileTime]:
    """Check and time each kernel of a case with each tile size."""
    from triton.runtime.errors import OutOfResources

    from megakernel.ops.kernels import launcher
    from megakernel.ops.kernels.launcher import Launcher, TileSizes

    computed = case_of(name)
    expected = _numbers(computed)
    shipped, uncached_plan = Launcher.tile_sizes, launcher.plan.__wrapped__
    for kernel, tile in todo:
        signal.alarm(PATIENCE)  # a kernel that hangs ends the process

        def tile_sizes(self: Launcher, asked: str, kernel: str = kernel, tile: list = tile) -> TileSizes:
            return TileSizes(*tile) if asked == kernel else shipped(self, asked)

        with patch.object(Launcher, "tile_sizes", tile_sizes), patch.object(launcher, "plan", uncached_plan):
            try:
                runs = [_numbers(computed) for _ in range(3)]
            except OutOfResources as error:
                yield TileTime(kernel, tile, None, f"too large: {error}".splitlines()[0])
                continue
            far = max(map(rms_ratio, runs[0], expected))
            same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))
            if far > TOLERANCE or not same:
                yield TileTime(kernel, tile, None, f"error {far:.1e}" if same else "runs differ")
                continue
            spent = sum(spent for launched, spent in launch_times(computed.train) if launched == kernel)
            yield TileTime(kernel, tile, spent)


def _numbers(computed: Computation) -> list[Tensor]:
    out, gradients = computed.train()
    torch.cuda.synchronize()
    return [out, *(x for x in gradients if x is not None)]


def tile_times(name: str) -> list[TileTime]:
    """`try_tiles` in processes of their own, because an illegal address ends the process that meets it."""
    todo = [(kernel, tile) for kernel in tiled_kernels(name) for tile in candidates(kernel)]
    results: list[TileTime] = []
    while todo:
        done = subprocess.run(
            [*CHILD, name, json.dumps(todo)],
            capture_output=True,
            text=True,
            check=False,
        )
        found = [TileTime(*json.loads(line)) for line in done.stdout.splitlines()]
        results += found
        todo = todo[len(found) :]
        if done.returncode:
            error = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            results.append(TileTime(*todo.pop(0), None, f"crashed: {error}"))
    return results


def tiles_page(results: dict[str, list[TileTime]]) -> list[str]:
    """A table per case, the fastest first, those that are wrong last."""
    lines = []
    for name, times in results.items():
        ordered = sorted(times, key=lambda x: (x.kernel, x.milliseconds is None, x.milliseconds or 0.0))
        rows = (
            table_row([x.kernel, *map(str, x.tile), x.problem or f"{x.milliseconds:.3f}"]) for x in ordered
        )
        header = ("kernel", "chunk", "block", "warps", "stages", "ms")
        lines += [f"## {name}", "", *table(header, rows)]
    return lines


def launches_page(results: dict[str, list[tuple[str, float]]]) -> list[str]:
    """A table of all launches, and one of the sums."""
    sums = (table_row([name, f"{sum(spent for _, spent in times):.3f}"]) for name, times in results.items())
    launches = (
        table_row([name, kernel.split("<")[0], f"{spent:.3f}"])
        for name, times in results.items()
        for kernel, spent in times
    )
    both = ("case", "sum of the launches, ms"), ("case", "launch", "ms")
    return [*table(both[0], sums), "", *table(both[1], launches)]


def main() -> int:
    parser = page_parser(__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--once", action="store_true", help="run each case once without a page, for a profiler"
    )
    parser.add_argument("--tiles", action="store_true", help="other tile sizes instead of the shipped ones")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "TILES"), help="used by --tiles")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernel_times: no GPU is here; run it where `nvidia-smi` lists one", file=sys.stderr)
        return 2
    if arguments.child:
        for result in try_tiles(arguments.child[0], json.loads(arguments.child[1])):
            print(json.dumps(result), flush=True)
        return 0
    names = [name for name in CASES if arguments.only in name]
    if arguments.materialize:
        for name in names:
            case_of(name).train()
        torch.cuda.synchronize()
        return 0
    command = "python -m benchmarks.kernels.times" + " --tiles" * arguments.tiles
    lines = page_header("Times of the kernels", command, f", {torch.cuda.get_device_name()}")
    if arguments.tiles:
        lines += tiles_page({name: tile_times(name) for name in names})
    else:
        lines += launches_page({name: launch_times(case_of(name).train) for name in names})
    write_page("\n".join(lines), arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
