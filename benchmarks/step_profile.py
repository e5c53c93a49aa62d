"""One training step on this machine, measured beside its counted budget: busy share, kernels, gaps, MFU.

    python -m benchmarks.step_profile configs/pretrain-350m.yaml --out page.md
    python -m benchmarks.step_profile configs/pretrain-350m.yaml training.compile=layer
    python -m benchmarks.step_profile configs/pretrain-350m.yaml --device cpu --small

The step is one GPU's share of a node of 8 (`benchmarks.kernels.budget`), in the engine of `megakernel pretrain`, on
random tokens in documents of about 1,000. After some steps that compile kernels and allocate memory come steps that are
timed, without a profiler, and then steps under torch's profiler, which are slower on the host. `--small` is the same
model with four narrow layers and short sequences: it tries every part of this, also on a CPU, where torch's operations
take the place of kernels, and its times say nothing.
"""

import math
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from benchmarks.kernels import budget as counted
from benchmarks.kernels.budget import Peaks, StepBudget
from benchmarks.kernels.counter import CORE
from benchmarks.kernels.step import StepTimes, read_trace, times_lines
from benchmarks.page import command_line, page_header, page_parser, run_main, table, table_row, write_page
from benchmarks.training_runs import VOCAB_SIZE
from data_pipeline.batch import Batch
from megakernel.config import Config, Parallel, RunFailed, UserError
from megakernel.model.compiled import GRAPHS
from megakernel.model.settings import model_settings
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.training.engine import Engine

LEARNING_RATE = 1e-4

DOCUMENT = 1000
"""Mean tokens of a document, about that of web pages."""

SMALL = {
    "model.num_layers": 4,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "training.seq_len": 512,
    "training.micro_batch_size": 2,
    "training.dtype": "float32",
}
SMALL_VOCAB_SIZE = 257

PRODUCTS = "matrix products (projections, MLP, head and loss)"
ELSE = "everything else"
MATRIX = re.compile(
    r"gemm|nvjet|cutlass_(?!.*flash)|xmma|^aten::(mm|addmm|bmm|_scaled_mm|linear)$", re.IGNORECASE
)
"""Names of kernels, or operations of a CPU, that multiply matrices."""

FLASH = re.compile(r"flash|scaled_dot_product", re.IGNORECASE)
"""Names of kernels of softmax attention."""


class MeasuredRun(NamedTuple):
    """What was measured of some steps."""

    device: str
    dtype: str
    seconds: list[float]
    """Of each step that was timed without a profiler."""

    first_seconds: float
    """Of the first step, which compiles."""

    graphs: int
    """Graphs of layers that torch.compile made."""

    loss: float
    times: StepTimes
    memory: float
    """Most bytes that the GPU held; 0 on a CPU."""

    @property
    def middle(self) -> float:
        """The median of `seconds`."""
        return statistics.median(self.seconds)


def packed_batch(config: Config, vocab_size: int, seed: int) -> Batch:
    """A micro-batch of random tokens in documents of random lengths."""
    rows, length = config.training.micro_batch_size, config.training.seq_len
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (rows, length), generator=draw)
    starts = torch.rand(rows, length, generator=draw) < 1 / min(DOCUMENT, length // 2)
    places = torch.arange(length).expand(rows, -1)
    first = places.where(starts, 0).cummax(1).values
    return Batch(tokens, tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool), places - first)


def measure(
    config: Config, vocab_size: int, device: torch.device, steps: tuple[int, int, int]
) -> MeasuredRun:
    """Train some steps; steps: how many warm up, are timed, and are profiled. After `prepare_device`."""
    mesh = Mesh.create(Parallel(), ProcessEnvironment(), device)
    try:
        engine = Engine(config, model_settings(config, mesh, vocab_size))
        batches = [packed_batch(config, vocab_size, seed) for seed in range(engine.micro_batches)]
        taken = 0

        def step() -> float:
            nonlocal taken
            engine.redraw(taken)
            loss = engine.train_step(batches, LEARNING_RATE).loss
            assert loss is not None
            taken += 1
            if device.type == "cuda":
                torch.cuda.synchronize()
            return loss

        before = GRAPHS.count
        first, *_ = [_seconds(step) for _ in range(steps[0])]
        seconds = [_seconds(step) for _ in range(steps[1])]
        times = _profiled(step, steps[2], device)
        on_gpu = device.type == "cuda"
        memory = float(torch.cuda.max_memory_allocated()) if on_gpu else 0.0
        name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
        graphs, dtype = GRAPHS.count - before, config.training.dtype
        return MeasuredRun(name, dtype, seconds, first, graphs, step(), times, memory)
    finally:
        mesh.destroy()


def _seconds(step: Callable[[], float]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _profiled(step: Callable[[], float], count: int, device: torch.device) -> StepTimes:
    """What the profiler's trace of some steps says; without hooks, so that compiled layers run compiled."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    # The first step under a profiler also starts it, so it is not recorded.
    plan = schedule(wait=0, warmup=1, active=count, repeat=1)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"

        def write(recorded: profile) -> None:
            recorded.export_chrome_trace(str(trace))

        with profile(activities=activities, schedule=plan, on_trace_ready=write) as recorded:
            for index in range(1 + count):
                with record_function(f"step {index}"):
                    step()
                recorded.step()
        times = read_trace(trace)
    assert times is not None, "a step runs operations"
    return times


def family(name: str, kernel_parts: dict[str, str]) -> str:
    """The row of the page that a kernel's time belongs to; kernel_parts: those of this repository's kernels."""
    if (part := kernel_parts.get(name)) is not None:
        return part
    if FLASH.search(name):
        return CORE
    return PRODUCTS if MATRIX.search(name) else ELSE


def beside(run: MeasuredRun, budget: StepBudget, peaks: Peaks) -> list[str]:
    """The table of measured and counted milliseconds of a step, by what a kernel's name tells."""
    measured: dict[str, float] = {}
    for name, each in run.times.spent.items():
        row = family(name, budget.kernel_parts)
        measured[row] = measured.get(row, 0.0) + sum(each) / run.times.steps / 1e3
    least: dict[str, float] = {}
    of_products = ("projections", "MLP", counted.HEAD)
    of_kernels = {CORE, *(part for part in budget.kernel_parts.values() if part == "short convolution")}
    for part, milliseconds in budget.milliseconds(peaks).items():
        row = PRODUCTS if part in of_products else part if part in of_kernels else ELSE
        least[row] = least.get(row, 0.0) + milliseconds
    rows = [
        table_row([row, f"{measured.get(row, 0.0):.3g}", f"{least.get(row, 0.0):.3g}"])
        for row in (PRODUCTS, *sorted(of_kernels), ELSE)
    ]
    gaps = (run.times.wall - run.times.busy) / run.times.steps / 1e3
    sums = (sum(measured.values()) + gaps, sum(least.values()))
    rows += [
        table_row(["gaps", f"{gaps:.3g}", "-"]),
        table_row(["sum", *(f"{x:.3g}" for x in sums)]),
    ]
    what = "kernels" if run.times.on_gpu else "operations"
    return table(("time of " + what, "measured ms per step", "counted, at least"), rows, numbers=True)


def headline(run: MeasuredRun, budget: StepBudget, peaks: Peaks | None) -> str:
    """Speed, MFU and busy share, in words."""
    tokens = budget.tokens / run.middle
    if peaks is None:
        mfu = f"no MFU, as the peak of {run.device} is not known (give --tflops and --bandwidth)"
    else:
        mfu = f"{budget.flops / run.middle / (peaks.tflops * 1e12):.1%} MFU of {peaks.tflops:g} TFLOP/s"
    compiled = f", {run.graphs} graphs of layers compiled" if budget.config.training.compile != "none" else ""
    memory = f", {run.memory / 1e9:.1f} GB at most" if run.memory else ""
    return (
        f"Measured on {run.device} in {run.dtype}: {run.middle * 1e3:.4g} ms a step (median of {len(run.seconds)}, "
        f"{min(run.seconds) * 1e3:.4g} to {max(run.seconds) * 1e3:.4g}), {tokens:,.0f} tokens/s, {mfu}; the device "
        f"works {run.times.busy_share:.0%} of the profiled steps' time. First step {run.first_seconds:.1f} s"
        f"{compiled}{memory}, loss {run.loss:.3f}."
    )


def page(run: MeasuredRun, budget: StepBudget, peaks: Peaks | None, command: str) -> str:
    """The page: what was measured, what was counted, and both side by side."""
    used = peaks or counted.chosen_peaks("h200", None, None)
    what = f", {run.device}" if run.times.on_gpu else ""
    lines = page_header("Profile of a training step", command, what)
    lines += [
        f"{counted.shape_line(budget.config, budget.vocab_size)}.",
        "",
        headline(run, budget, peaks),
        "",
    ]
    lines += ["## Measured beside counted", "", *beside(run, budget, used)]
    lines += ["## Counted", "", counted.counted_line(budget, used), "", *counted.budget_table(budget, used)]
    lines += ["## Measured", "", *times_lines(run.times)]
    return "\n".join(lines)


def main() -> int:
    """Measure a step, and write the page."""
    parser = page_parser(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--vocab-size", type=int, help=f"default: {VOCAB_SIZE:,}")
    parser.add_argument(
        "--small", action="store_true", help="four narrow layers and short sequences, to try it"
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed")
    parser.add_argument("--profiled", type=int, default=2, help="steps under the profiler")
    parser.add_argument("--tflops", type=float, help="the device's peak, if it is not known")
    parser.add_argument("--bandwidth", type=float, help="TB/s of its memory, if they are not known")
    options = parser.parse_intermixed_args()
    if min(options.warmup, options.steps, options.profiled) < 1:
        raise UserError("--warmup, --steps and --profiled are at least 1")
    small = [f"{key}={value}" for key, value in SMALL.items()] if options.small else []
    vocab_size = options.vocab_size or (SMALL_VOCAB_SIZE if options.small else VOCAB_SIZE)
    overrides = [*options.overrides, *small]
    config = counted.on_one_device(options.config, overrides, vocab_size)
    # A CPU trains in float32 what is counted as a GPU would run it.
    on_gpu = counted.on_one_device(options.config, [*overrides, "training.dtype=bfloat16"], vocab_size)
    counted.check_countable(on_gpu)
    device = prepare_device(options.device, 0)
    peaks = Peaks.of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if options.tflops and options.bandwidth:
        peaks = Peaks("given", options.tflops, options.bandwidth)
    run = measure(config, vocab_size, device, (options.warmup, options.steps, options.profiled))
    if not math.isfinite(run.loss):
        raise RunFailed(f"the loss is {run.loss} after a few steps, so their times mean nothing")
    budget = counted.count_step(on_gpu, vocab_size)
    write_page(page(run, budget, peaks, command_line("step_profile")), options.out)
    if options.out is not None:
        print(f"{headline(run, budget, peaks)} Page: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
