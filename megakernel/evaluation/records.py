"""Records of evaluations: RUN/evaluation/step_N/TASK.json, and the same results in TensorBoard.

TensorBoard keeps every event: a scalar written twice at one step becomes two points, and purging from a step on hides
the later events of all tags. Evaluations therefore have their own folder, RUN/tensorboard/evaluation, with a single
file that is rewritten from all results, in order of steps, at each evaluation.
"""

import json
import re
from contextlib import suppress
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

from megakernel.checkpoint.manifest import step_of
from megakernel.config.extras import lacking
from megakernel.training.observing.event_files import add_png, replaced_events
from megakernel.training.run_folder import write_atomically

from .answer_counts import AnswerCounts, heat_map
from .subject import TaskResult

_LONGEST_NAME = 200
"""Bytes; file systems allow 255, and extensions follow."""


def file_name(spec: str) -> str:
    """A spec as a file name and part of a tag; what is too long for a file name ends with a hash instead."""
    name = re.sub(r"[^\w.]+", "-", spec).strip("-")
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    return f"{name.encode()[: _LONGEST_NAME - 17].decode(errors='ignore')}-{sha256(spec.encode()).hexdigest()[:16]}"


def record(folder: Path, step: int, spec: str, result: TaskResult, tensorboard: bool = True) -> Path:
    """Write a task's result at a step of the run in `folder`; returns the path of the JSON file.

    TASK.md beside it holds the table, TASK.png the heat map if there is one (see `not_drawn`). They replace those of
    an earlier evaluation of the same task and step, in TensorBoard too.
    """
    step_folder = folder / "evaluation" / f"step_{step}"
    step_folder.mkdir(parents=True, exist_ok=True)
    file = step_folder / f"{file_name(spec)}.json"
    if not isinstance(result, AnswerCounts) or not_drawn(result) or (plot := heat_map(result)) is None:
        file.with_suffix(".png").unlink(missing_ok=True)
    else:
        file.with_suffix(".png").write_bytes(plot)
    file.with_suffix(".md").write_text(result.table().markdown() + "\n", encoding="utf-8")
    # Last, because readers look for this file.
    write_atomically(
        file, json.dumps({"task": spec, **result.as_dict(), "scalars": result.scalars()}, indent=1) + "\n"
    )
    if tensorboard:
        with (folder / "evaluation" / ".lock").open("a") as lock:
            # Of two evaluations that end together, the second must see the results and the events of the first.
            with suppress(OSError):  # a file system without locks
                flock(lock, LOCK_EX)
            _write_events(folder)
    return file


def not_drawn(result: TaskResult) -> str | None:
    """Why the heat map of a result is left out, with the remedy; None if it is drawn, or there is none to draw."""
    if not isinstance(result, AnswerCounts) or not result.depths:
        return None
    return lacking("the heat map of accuracies by length and depth is left out: it", "matplotlib")


def _write_events(folder: Path) -> None:
    """Rewrite RUN/tensorboard/evaluation from RUN/evaluation."""
    with replaced_events(folder / "tensorboard" / "evaluation") as writer:
        for step, file in _results(folder):
            result = json.loads(file.read_text(encoding="utf-8"))
            tag = f"evaluation/{file.stem}"
            for name, value in result["scalars"].items():
                writer.add_scalar(f"{tag}/{name}", value, step)
            writer.add_text(tag, file.with_suffix(".md").read_text(encoding="utf-8"), step)
            if file.with_suffix(".png").exists():
                add_png(writer, tag, file.with_suffix(".png").read_bytes(), step)


def _results(folder: Path) -> list[tuple[int, Path]]:
    """Every (step, JSON file), in order of steps."""
    files = (folder / "evaluation").glob("step_*/*.json")
    return sorted((step, file) for file in files if (step := step_of(file.parent)) is not None)
