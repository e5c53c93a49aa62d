"""How far `megakernel plan` is off: bytes kept, bytes held at most and time of a step, planned and measured on a CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.plan_calibration --out benchmarks/results/plan_calibration_cpu.md

Times are processor time, so that other work on the machine counts little. The shares of the machine's limits that each
kind of work reaches are fitted to one half of the runs, and the errors told of the other half.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.page import description
from megakernel.analysis.planning import ASSUMED, CPU, Gpu, Job, Layout, Rates, activations
from megakernel.analysis.planning.calibration import Held, held_bytes, kept_bytes, step_seconds
from megakernel.analysis.planning.memory import memory
from megakernel.analysis.planning.step import necessary_flops, step
from megakernel.config import Config, Parallel
from megakernel.config.validation import validate
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment

VOCAB = 1000
LARGE = 100.0
"""A share that says that the work took no time beside the rest."""

FITTED = ("matrix", "softmax", "kernel", "memory")

RUNS: list[tuple[str, int, int, int, str]] = [
    # attention, layers, width, tokens of a row, recomputation
    ("softmax", 2, 256, 1024, "none"),
    ("softmax", 4, 128, 2048, "full"),
    ("linear", 2, 256, 2048, "none"),
    ("hedgehog", 2, 128, 4096, "selective"),
    ("flurka", 2, 256, 2048, "none"),
    ("flurka", 4, 128, 4096, "full"),
    ("local", 4, 256, 1024, "none"),
    ("softmax", 2, 512, 1024, "none"),
    ("softmax", 2, 256, 2048, "selective"),
    ("linear", 4, 256, 1024, "full"),
    ("hedgehog", 4, 256, 2048, "none"),
    ("flurka", 4, 256, 1024, "none"),
    ("flurka", 2, 512, 2048, "full"),
    ("local", 2, 512, 2048, "none"),
]
"""The first half fits the rates, the second tells the error."""

HALF = len(RUNS) // 2


@dataclass(frozen=True)
class Measured:
    """One run, planned and measured."""

    job: Job
    kept: int
    """Bytes that the second transformer layer keeps."""

    held: Held
    seconds: float


def configuration(attention: str, layers: int, width: int, tokens: int, recompute: str) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "calibration"},
        "model": {"num_layers": layers, "hidden_size": width, "num_heads": 4, "attention": attention},
        "data": {"train": "data/none"},
        "parallel": {"zero_stage": 0},
        "training": {
            "steps": 1,
            "seq_len": tokens,
            "global_batch_size": 1,
            "dtype": "float32",
            "activation_checkpointing": recompute,
        },
    }
    return validate(tree)


def measure(run: tuple[str, int, int, int, str]) -> Measured:
    config = configuration(*run)
    layout = Layout(1, False, 1, 1, 1, 0, 1, config.training.activation_checkpointing)
    device = prepare_device("cpu", 0)

    def alone(function: Callable[[Config, int, Mesh], Any]) -> Any:
        mesh = Mesh.create(Parallel(), ProcessEnvironment(), device)
        try:
            return function(config, VOCAB, mesh)
        finally:
            mesh.destroy()

    return Measured(
        Job(config, VOCAB, layout, CPU),
        alone(kept_bytes)[2],
        alone(held_bytes),
        alone(step_seconds),
    )


def this_machine() -> Gpu:
    """One core's limits, in processor time: the fastest of several copies and products."""
    rows, size = 512, 2**25
    left, right = torch.randn(2, rows, rows)
    source = torch.zeros(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    product, copy = fastest(lambda: left @ right), fastest(lambda: target.copy_(source))
    peak = 2 * rows**3 / product
    return Gpu("one core", 0, 2 * size / copy, peak, peak, 1, 1, 1, "measured in this run")


def fastest(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(200):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def fit(runs: list[Measured], core: Gpu) -> Rates:
    """Shares whose times come nearest to the measured ones, relatively: least squares, none negative."""
    shares = np.array([columns(run.job, core) for run in runs])
    scaled = shares / np.array([[run.seconds] for run in runs])
    found = _nonnegative(scaled, np.ones(len(runs)))
    inverse = dict(zip(FITTED, found))
    source = "fitted to the first half of the runs"
    return replace(ASSUMED, source=source, **{name: 1 / max(x, 1e-3) for name, x in inverse.items()})


def columns(job: Job, core: Gpu) -> list[float]:
    """Seconds of each kind of work at the machine's limits."""
    seconds = []
    for name in FITTED:
        others = {other: 1e12 for other in FITTED if other != name}
        seconds.append(step(job, core, replace(ASSUMED, **{name: 1.0}, **others)).seconds)
    return seconds


def _nonnegative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares by coordinate descent over numbers above 0."""
    x = np.ones(matrix.shape[1])
    for _ in range(20_000):
        for i in range(len(x)):
            rest = wanted - matrix @ x + matrix[:, i] * x[i]
            x[i] = max(0.0, matrix[:, i] @ rest / (matrix[:, i] @ matrix[:, i]))
    return x


def table(runs: list[Measured], core: Gpu, rates: Rates) -> list[str]:
    head = "attention | layers | width | tokens | recompute | kept by a layer, MB | planned | off | "
    head += "held at most, MB | planned | off | step, s | planned | off"
    lines = [f"| {head} |", "|---" * 14 + "|"]
    for run in runs:
        model, training = run.job.model, run.job.config.training
        kept = activations.layer(run.job, run.job.attentions[1]).total
        most, seconds = memory(run.job).total, step(run.job, core, rates).seconds
        cells = [name_of(run.job), str(model.num_layers), str(model.hidden_size), f"{training.seq_len:,}"]
        cells += [training.activation_checkpointing]
        for real, planned, unit in (
            (run.kept, kept, 1e6),
            (run.held.peak, most, 1e6),
            (run.seconds, seconds, 1),
        ):
            cells += [f"{real / unit:.3g}", f"{planned / unit:.3g}", f"{planned / real - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def name_of(job: Job) -> str:
    return next(run[0] for run in RUNS if configuration(*run).model == job.model)


def page(runs: list[Measured], core: Gpu, rates: Rates, command: str) -> str:
    kept = [activations.layer(run.job, run.job.attentions[1]).total / run.kept - 1 for run in runs]
    held = [memory(run.job).total / run.held.peak - 1 for run in runs]
    off = [step(run.job, core, rates).seconds / run.seconds - 1 for run in runs]
    flops = sum(necessary_flops(run.job) for run in runs)
    fitted = ", ".join(
        f"{name} {getattr(rates, name):.2f}" if getattr(rates, name) < LARGE else f"{name} too little to tell"
        for name in FITTED
    )
    lines = [
        "# What `megakernel plan` says and what a CPU does",
        "",
        f"`{command}`, {date.today().isoformat()}, {description()}; float32, one process, one thread, one row per "
        f"step, {VOCAB:,} ids. {flops / 1e12:.2f} TFLOP of necessary work in all.",
        "",
        f"One core: {core.peak / 1e9:,.0f} GFLOP/s in products of 512 x 512, {core.bandwidth / 1e9:,.1f} GB/s in "
        f"copies of 32 MiB. Shares fitted to the first {HALF} runs: {fitted}.",
        "",
        f"* bytes kept by a layer: off by {min(kept):+.1%} to {max(kept):+.1%};",
        f"* bytes held at most: off by {min(held):+.1%} to {max(held):+.1%};",
        f"* step, models that fitted the shares: off by {min(off[:HALF]):+.0%} to {max(off[:HALF]):+.0%};",
        f"* step, models that fitted no share: off by {min(off[HALF:]):+.0%} to {max(off[HALF:]):+.0%}.",
        "",
        "Bytes are those of tensors, counted as they are made and freed. Times are processor seconds, the least of 3; "
        f"other work shared the machine (load average {os.getloadavg()[1]:.0f}), so that the core's limits are "
        "those of that hour, and a share of them can come out above 1.",
        "",
        "## Runs that fitted the shares",
        "",
        *table(runs[:HALF], core, rates),
        "",
        "## Other runs",
        "",
        *table(runs[HALF:], core, rates),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the page goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    core = this_machine()
    runs = [measure(run) for run in RUNS]
    rates = fit(runs[:HALF], core)
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.plan_calibration --out {args.out}"
    args.out.write_text(page(runs, core, rates, command), encoding="utf-8")
    print(args.out.read_text(), end="")


if __name__ == "__main__":
    main()
