"""Runs that a benchmark is made of: trained when they are not yet, continued where they were stopped, else read."""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megakernel.checkpoint.manifest import step_of
from megakernel.checkpoint.trained_run import find_checkpoint
from megakernel.config import PRESETS, Attention, Config, UserError, check_same_run, expand_preset, load
from megakernel.config.validation import validate
from megakernel.evaluation.records import file_name
from megakernel.training.observing.metrics_writer import logged

PARTS: dict[str, dict[str, Any]] = {
    "convolution": {"short_convolution": 4},
    "gate": {"output_norm": True, "output_gate": "silu"},
}
"""What a mechanism may have around it, by the name that stands behind its preset's: flurka+convolution."""

RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Environment of measured memory: glibc by itself keeps freed tensors of up to 32 MiB, and returns larger ones."""


def add_presets(parser: argparse.ArgumentParser, default: str | None, what: str = "presets") -> None:
    """Declare what is laid over every run, and the presets that are trained."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="laid over every run")
    parser.add_argument("--attention", type=_presets, default=default, metavar="A,B", help=what)


def _presets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PRESETS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is no preset; choose {', '.join(PRESETS)}")
    return names


def named(name: str) -> dict[str, Any]:
    """The attention of a preset, or of one with parts around it. ValueError: a name that is not known."""
    preset, *parts = name.split("+")
    if preset not in PRESETS or not all(part in PARTS for part in parts):
        raise ValueError(
            f"{name} is no preset; choose {', '.join(PRESETS)}, and +{', +'.join(PARTS)} behind it"
        )
    return {"preset": preset, **{key: value for part in parts for key, value in PARTS[part].items()}}


def configured(model: dict[str, Any], training: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A run of one sequence a step in float32, where these keys say nothing else; no benchmark reads its data."""
    training = {"steps": 1, "global_batch_size": 1, "dtype": "float32", **training}
    data = {"train": "data/none", **sections.pop("data", {})}
    return validate(
        {"run": {"name": "benchmark"}, "model": model, "data": data, "training": training, **sections}
    )


def in_blocks(name: str, block_size: int, rank: int, whole: int) -> dict[str, Any]:
    """That attention with blocks that a short sequence has several of; whole: landmarks of those without blocks."""
    tree = named(name)
    form = Attention.model_validate(expand_preset(tree))
    if form.compression is not None:
        blocks = {"block_size": block_size, "rank": rank}
        return {**tree, "compression": {"rank": whole} if form.counts_positions else blocks}
    return {**tree, **({"near": {"block_size": block_size}} if form.near is not None else {})}


def trained(config: Path, overrides: Sequence[str]) -> Path:
    """The folder of a run that has come to its last step.

    Raises UserError where the folder is of another configuration, and where `megakernel pretrain` fails, which says
    why.
    """
    wanted = load(config, overrides)
    folder = wanted.run.folder
    if (folder / "config.yaml").is_file():
        check_same_run((folder / "config.yaml").read_text(encoding="utf-8"), wanted, folder)
        if (folder / "checkpoints").is_dir() and find_checkpoint(folder).step >= wanted.training.steps:
            return folder
    megakernel("pretrain", str(config), *overrides)
    return folder


def uptrained(config: Path, overrides: Sequence[str]) -> tuple[Path, dict[str, Any]]:
    """The folder of an up-training that has come to its end, and what it reports. Raises UserError as `trained`."""
    from megakernel.uptraining.report import REPORT  # seconds, which the other benchmarks need not wait for

    wanted = load(config, overrides)
    folder = wanted.run.folder
    file = folder / f"{REPORT}.json"
    if file.is_file():
        check_same_run((folder / "config.yaml").read_text(encoding="utf-8"), wanted, folder)
    else:
        megakernel("uptrain", str(config), *overrides)
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return folder, report


def megakernel(*arguments: str) -> None:
    """Run a command to its end; what it prints goes to stderr. Raises UserError where it fails, which says why."""
    status = subprocess.run([sys.executable, "-m", "launch.cli", *arguments], stdout=sys.stderr).returncode
    if status:
        said = " ".join(("megakernel", *arguments))
        raise UserError(f"`{said}` ended with status {status}; start this again to go on")


def measured(folder: Path, step: int, task: str, *options: str) -> dict[str, Any]:
    """The result of `megakernel evaluate` for a task, measured if it is not there yet."""
    file = folder / "evaluation" / f"step_{step}" / f"{file_name(task)}.json"
    if not file.exists():
        megakernel("evaluate", str(folder), "--task", task, *options)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def curve(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value of a tag in a run's metrics.jsonl."""
    return {line["step"]: line[tag] for line in logged(folder) if line.get(tag) is not None}


def best_step(folder: Path) -> int:
    """The checkpoint kept, of the best validation accuracy, or lowest loss where there is none; the later of equals."""
    kept = [step for path in (folder / "checkpoints").glob("step_*") if (step := step_of(path)) is not None]
    accuracy = curve(folder, "eval/accuracy")
    measured = accuracy or {step: -loss for step, loss in curve(folder, "eval/loss").items()}
    return max(kept, key=lambda step: (measured.get(step, float("-inf")), step))
