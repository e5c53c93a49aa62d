"""RUN/evaluation/step_N/TASK.json: what was measured, and the same in TensorBoard.

TensorBoard keeps every event it finds: a scalar written twice at one step is two points, and only a writer that
says from which step on it starts anew hides older ones, those of all tags. So the events of evaluations are a folder
of their own, RUN/tensorboard/evaluation, which always holds one file, made anew of all results at each evaluation,
steps in order: nothing is in it twice.
"""

import json
import re
from pathlib import Path

from megakernel.checkpoint.manifest import step_of
from megakernel.training.observing.event_files import add_png, replaced_events
from megakernel.training.run_folder import write_whole

from .answer_counts import AnswerCounts, heat_map
from .subject import Result


def file_name(spec: str) -> str:
    """A spec as a file's name and a part of a tag."""
    return re.sub(r"[^\w.]+", "-", spec).strip("-")


def record(folder: Path, step: int, spec: str, result: Result, tensorboard: bool = True) -> Path:
    """Write what a task measured at a step of the run in `folder`; the JSON file's path.

    Beside it TASK.md holds the table, and TASK.png the heat map where there is one. What an earlier evaluation of
    the same task and step wrote is replaced, in TensorBoard too.
    """
    place = folder / "evaluation" / f"step_{step}"
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{file_name(spec)}.json"
    if isinstance(result, AnswerCounts) and (plot := heat_map(result)) is not None:
        file.with_suffix(".png").write_bytes(plot)
    file.with_suffix(".md").write_text(result.table().markdown() + "\n", encoding="utf-8")
    # Last: it is what is looked for.
    write_whole(
        file, json.dumps({"task": spec, **result.as_dict(), "scalars": result.scalars()}, indent=1) + "\n"
    )
    if tensorboard:
        _write_events(folder)
    return file


def _write_events(folder: Path) -> None:
    """Make RUN/tensorboard/evaluation of everything in RUN/evaluation."""
    with replaced_events(folder / "tensorboard" / "evaluation") as writer:
        for step, file in _results(folder):
            found = json.loads(file.read_text(encoding="utf-8"))
            tag = f"evaluation/{file.stem}"
            for name, value in found["scalars"].items():
                writer.add_scalar(f"{tag}/{name}", value, step)
            writer.add_text(tag, file.with_suffix(".md").read_text(encoding="utf-8"), step)
            if file.with_suffix(".png").exists():
                add_png(writer, tag, file.with_suffix(".png").read_bytes(), step)


def _results(folder: Path) -> list[tuple[int, Path]]:
    """Every JSON file with its step, in order of steps."""
    files = (folder / "evaluation").glob("step_*/*.json")
    return sorted((step, file) for file in files if (step := step_of(file.parent)) is not None)
