"""Records of evaluations: RUN/evaluation/step_N/TASK.json, and the same results in TensorBoard and trackers.

TensorBoard keeps every event: a scalar written twice at one step becomes two points, and purging from a step on hides
the later events of all tags. Evaluations therefore are a run of their own, RUN/evaluation, with a single file that is
rewritten from all results, in order of steps, at each evaluation.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, flock
from hashlib import sha256
from pathlib import Path

from megakernel.checkpoint.manifest import step_of
from megakernel.config import Config
from megakernel.config.extras import lacking
from megakernel.training.observing.event_files import add_png, replaced_events
from megakernel.training.observing.metrics_writer import StepMetrics
from megakernel.training.observing.trackers import Trackers, tracked_name
from megakernel.training.run_folder import events_folder, write_atomically

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
    recorded = {**result.as_dict(), "task": spec, "scalars": result.scalars()}
    write_atomically(file, json.dumps(recorded, indent=1) + "\n")
    if tensorboard:
        with (folder / "evaluation" / ".lock").open("a") as lock:
            # Of two evaluations that end together, the second must see the results and the events of the first.
            with suppress(OSError):  # a file system without locks
                flock(lock, LOCK_EX)
            _write_events(folder)
    return file


def send(config: Config, folder: Path, step: int, files: Sequence[Path], note: Callable[[str], None]) -> None:
    """Send results at a step of the run in `folder` to its trackers, as a run of their own: it may be training on.

    config: the run's. files: the JSON files that `record` has written. note: prints a line.
    """
    if not config.logging.trackers:
        return
    trackers = Trackers(
        config, folder / "evaluation", note, f"{tracked_name(folder) or config.run.name}/evaluation"
    )
    for file in files:
        trackers.write(step, _entry(file))
    trackers.close(failed=False)


def _entry(file: Path) -> StepMetrics:
    """The scalars and the table of a result, by tag."""
    tag, result = f"evaluation/{file.stem}", json.loads(file.read_text(encoding="utf-8"))
    scalars = {f"{tag}/{name}": value for name, value in result["scalars"].items()}
    return StepMetrics(scalars, texts={tag: file.with_suffix(".md").read_text(encoding="utf-8")})


def not_drawn(result: TaskResult) -> str | None:
    """Why the heat map of a result is left out, with the remedy; None if it is drawn, or there is none to draw."""
    if not isinstance(result, AnswerCounts) or not result.depths:
        return None
    return lacking("the heat map of accuracies by length and depth is left out: it", "matplotlib")


def _write_events(folder: Path) -> None:
    """Rewrite the events of the run's evaluations from RUN/evaluation."""
    with replaced_events(events_folder(folder, "evaluation")) as writer:
        for step, file in _results(folder):
            shown = _entry(file)
            for tag, value in shown.scalars.items():
                writer.add_scalar(tag, value, step)
            for tag, text in shown.texts.items():
                writer.add_text(tag, text, step)
                if file.with_suffix(".png").exists():
                    add_png(writer, tag, file.with_suffix(".png").read_bytes(), step)


def _results(folder: Path) -> list[tuple[int, Path]]:
    """Every (step, JSON file), in order of steps."""
    files = (folder / "evaluation").glob("step_*/*.json")
    return sorted((step, file) for file in files if (step := step_of(file.parent)) is not None)
