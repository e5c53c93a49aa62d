"""How far `megakernel plan` is off: bytes kept by a layer and bytes held at most, planned and measured on a CPU.

OMP_NUM_THREADS=1 python -m benchmarks.plan_calibration --out benchmarks/results/plan_calibration_cpu.md
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.page import opening
from benchmarks.real_runs import Held, held_bytes, kept_bytes
from megakernel.analysis.planning import CPU, Job, Layout
from megakernel.analysis.planning.memory import memory
from megakernel.config import Config, Parallel
from megakernel.config.validation import validate
from megakernel.parallel import Mesh, prepare_device
from megakernel.parallel.processes import ProcessEnvironment

VOCAB = 1000
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


@dataclass(frozen=True)
class Measured:
    """One run, planned and measured."""

    job: Job
    kept: int
    """Bytes that the second transformer layer keeps."""

    held: Held


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
    )


def errors(runs: list[Measured]) -> tuple[list[float], list[float]]:
    """How far bytes kept by a layer and bytes held at most are off, of each run."""
    kept = [run.job.measured(1).kept / run.kept - 1 for run in runs]
    return kept, [memory(run.job).total / run.held.peak - 1 for run in runs]


def table(runs: list[Measured]) -> list[str]:
    head = "attention | layers | width | tokens | recompute | kept by a layer, MB | planned | off | "
    head += "held at most, MB | planned | off"
    lines = [f"| {head} |", "|---" * 11 + "|"]
    for run in runs:
        model, training = run.job.model, run.job.config.training
        kept, most = run.job.measured(1).kept, memory(run.job).total
        cells = [name_of(run.job), str(model.num_layers), str(model.hidden_size), f"{training.seq_len:,}"]
        cells += [training.activation_checkpointing]
        for real, planned in ((run.kept, kept), (run.held.peak, most)):
            cells += [f"{real / 1e6:.3g}", f"{planned / 1e6:.3g}", f"{planned / real - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def name_of(job: Job) -> str:
    return next(run[0] for run in RUNS if configuration(*run).model == job.model)


def page(runs: list[Measured], command: str) -> str:
    kept, held = errors(runs)
    lines = [
        *opening(
            "What `megakernel plan` says and what a CPU holds",
            command,
            f"; float32, one process, one thread, one row per step, {VOCAB:,} ids",
        ),
        f"* bytes kept by a layer: off by {min(kept):+.1%} to {max(kept):+.1%};",
        f"* bytes held at most: off by {min(held):+.1%} to {max(held):+.1%}.",
        "",
        "Bytes are those of tensors, counted as they are made and freed. Planned with the implementations of a CPU.",
        "",
        *table(runs),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="where the page goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [measure(run) for run in RUNS]
    command = f"OMP_NUM_THREADS=1 python -m benchmarks.plan_calibration --out {args.out}"
    args.out.write_text(page(runs, command), encoding="utf-8")
    print(args.out.read_text(), end="")


if __name__ == "__main__":
    main()
