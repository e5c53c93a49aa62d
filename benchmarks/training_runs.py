"""Training runs of benchmarks: started or resumed if they are unfinished, otherwise only read."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megakernel.checkpoint.manifest import step_of
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.config import PRESETS, Attention, Config, UserError, check_same_run, expand_preset, load
from megakernel.config.validation import validate
from megakernel.evaluation.records import file_name
from megakernel.training.observing.metrics_writer import read_metrics

PARTS: dict[str, dict[str, Any]] = {
    "convolution": {"short_convolution": 4},
    "gate": {"output_norm": True, "output_gate": "silu"},
}
"""Parts around a mechanism, by their suffix to a preset's name: flurka+convolution."""

VOCAB_SIZE = 50_257
"""GPT-2's ids, which configs/data/fineweb-edu.yaml has."""

RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Environment for memory measurements: by default glibc keeps freed tensors of up to 32 MiB."""


def preset_tree(name: str) -> dict[str, Any]:
    """`model.attention` of PRESET or PRESET+PART. Raises ValueError for an unknown name."""
    preset, *parts = name.split("+")
    if preset not in PRESETS or not all(part in PARTS for part in parts):
        raise ValueError(
            f"{name} is no preset; choose {', '.join(PRESETS)}, with or without +{', +'.join(PARTS)} after it"
        )
    return {"preset": preset, **{key: value for part in parts for key, value in PARTS[part].items()}}


def benchmark_config(model: dict[str, Any], training: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A run with one sequence per step in float32 unless these keys differ; its data is never read."""
    training = {"steps": 1, "global_batch_size": 1, "dtype": "float32", **training}
    data = {"train": "data/none", **sections.pop("data", {})}
    return validate(
        {"run": {"name": "benchmark"}, "model": model, "data": data, "training": training, **sections}
    )


def with_small_blocks(name: str, block_size: int, rank: int, sequence_rank: int) -> dict[str, Any]:
    """`preset_tree` with blocks for short sequences. sequence_rank: landmarks if there are no blocks."""
    tree = preset_tree(name)
    attention = Attention.model_validate(expand_preset(tree))
    if attention.compression is not None:
        blocks = {"block_size": block_size, "rank": rank}
        return {
            **tree,
            "compression": {"rank": sequence_rank} if attention.has_position_parameters else blocks,
        }
    return {**tree, **({"near": {"block_size": block_size}} if attention.near is not None else {})}


def train_run(config: Path, overrides: Sequence[str], *options: str) -> Path:
    """Finish a run if it is unfinished, and return its folder. options: of `megakernel pretrain`.

    Raises UserError if the folder has another configuration, or if `megakernel pretrain` fails (it prints why).
    """
    run_config = load(config, overrides)
    folder = run_config.run.folder
    if (folder / "config.yaml").is_file():
        check_same_run((folder / "config.yaml").read_text(encoding="utf-8"), run_config, folder)
        if (folder / "checkpoints").is_dir() and find_checkpoint(folder).step >= run_config.training.steps:
            return folder
    run_megakernel("pretrain", str(config), *overrides, *options)
    return folder


def uptrain_run(config: Path, overrides: Sequence[str], *options: str) -> tuple[Path, dict[str, Any]]:
    """Finish an up-training if it is unfinished; return its folder and report. Raises UserError like `train_run`."""
    from megakernel.uptraining.report import REPORT  # takes seconds, and few benchmarks need it

    run_config = load(config, overrides)
    folder = run_config.run.folder
    file = folder / f"{REPORT}.json"
    if file.is_file():
        check_same_run((folder / "config.yaml").read_text(encoding="utf-8"), run_config, folder)
    else:
        run_megakernel("uptrain", str(config), *overrides, *options)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return folder, report


def run_megakernel(*arguments: str) -> None:
    """Run a `megakernel` command with its output on stderr. Raises UserError if it fails (it prints why).

    SIGTERM is passed on, and then ends this process: a training run saves and ends, instead of going on alone.
    """
    ends = False

    def end(*_: Any) -> None:
        nonlocal ends
        ends = True
        process.terminate()

    with subprocess.Popen([sys.executable, "-m", "launch.cli", *arguments], stdout=sys.stderr) as process:
        before = signal.signal(signal.SIGTERM, end)
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if ends:
        sys.exit(128 + signal.SIGTERM)
    if status:
        command = " ".join(("megakernel", *arguments))
        raise UserError(f"`{command}` ended with status {status}; run this again to continue")


def evaluate_tasks(folder: Path, step: int, tasks: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Name -> the result of `megakernel evaluate --task`, measured at this step unless its file exists."""
    place = folder / "evaluation" / f"step_{step}"
    files = {name: place / f"{file_name(task)}.json" for name, task in tasks.items()}
    if missing := [f"--task={tasks[name]}" for name, file in files.items() if not file.exists()]:
        run_megakernel("evaluate", str(folder), "--step", str(step), *missing)
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def metric_curve(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value of a metric in a run's metrics.jsonl."""
    return {line["step"]: line[tag] for line in read_metrics(folder) if line.get(tag) is not None}


def best_step(folder: Path) -> int:
    """Step of the kept checkpoint with the best validation accuracy (without it: loss); the last one of equals."""
    kept = [step for path in (folder / "checkpoints").glob("step_*") if (step := step_of(path)) is not None]
    accuracy = metric_curve(folder, "eval/accuracy")
    scores = accuracy or {step: -loss for step, loss in metric_curve(folder, "eval/loss").items()}
    return max(kept, key=lambda step: (scores.get(step, float("-inf")), step))
