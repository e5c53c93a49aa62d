"""A run as one finds it: its configuration and one of its checkpoints. Loads no torch, so that errors come at once."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.config import Config, UserError, from_yaml
from megakernel.config.errors import nearest_first
from megakernel.config.section import Section
from megakernel.parallel.ranks import Ranks

from .folder import CheckpointFolder
from .manifest import Checkpoint, step_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A run folder and the checkpoint to take from it."""

    config: Config
    """What the run was trained with."""

    checkpoint: Checkpoint
    """The chosen checkpoint, whole."""

    @classmethod
    def find(cls, folder: Path, step: int | None = None) -> "TrainedRun":
        """The run in `folder` at a step, or at its newest good checkpoint.

        Raises UserError for a folder that is none of a run, and as `find_checkpoint` does.
        """
        if not (folder / "config.yaml").is_file():
            raise UserError(
                f"{folder} is not the folder of a run (it has no config.yaml); {_runs_beside(folder)}"
            )
        return cls(recorded_config(folder), find_checkpoint(folder, step))


def recorded_config(folder: Path) -> Config:
    """The configuration of a run. Its relative paths count from where the run was started, wherever one looks from.

    That is the folder in which run.root/run.name is the run's, also after it was moved as a whole. Where run.root is
    absolute, or the run was taken out of it, they count from the working folder.
    """
    file = folder / "config.yaml"
    config = from_yaml(file.read_text(encoding="utf-8"), str(file))
    here, named = folder.resolve(), config.run.folder
    if named.is_absolute() or here.parts[-len(named.parts) :] != named.parts:
        return config
    start = here.parents[len(named.parts) - 1]
    if start == Path.cwd():
        return config
    return _counted_from(start, config).model_copy(update={"run": config.run})


def _counted_from(start: Path, value: Any) -> Any:
    if isinstance(value, Path):
        return start / value
    if isinstance(value, list):
        return [_counted_from(start, item) for item in value]
    if isinstance(value, Section):
        return value.model_copy(
            update={name: _counted_from(start, getattr(value, name)) for name in type(value).model_fields}
        )
    return value


def find_checkpoint(folder: Path, step: int | None = None, ranks: Ranks | None = None) -> Checkpoint:
    """The checkpoint of a run at a step, or its newest good one; newer ones that are broken are logged.

    ranks: those that look for it together; None: this process alone.
    Raises UserError for a run that has not saved yet, a step without a checkpoint, and where none is whole.
    """
    root = folder / "checkpoints"
    if step is not None:
        return _at_step(root, step)
    found = CheckpointFolder(root, keep=1, ranks=ranks).newest_good()
    for path, reason in found.broken.items() if ranks is None or ranks.rank == 0 else ():
        _log.warning("%s cannot be used (%s); taking the one before", path, reason)
    if found.checkpoint is None:
        remedy = _stages_instead(folder) or "let its run train on until it saves one (checkpoint.every)"
        raise UserError(f"{folder} has no checkpoint; {remedy}")
    return found.checkpoint


def finished(config: Config) -> str | None:
    """A line that says so of a run whose last checkpoint is whole; None of one that is still to train."""
    folder, steps = config.run.folder, config.training.steps
    root = folder / "checkpoints"
    last = max((step_of(path) or 0 for path in root.glob("step_*")), default=0)
    if last < steps:
        return None
    try:
        found = Checkpoint.read(root / f"step_{last}")
        for name, record in found.files.items():
            record.compare(found.folder / name, name)
    except (UserError, OSError):  # the start says so, and goes on from the one before
        return None
    return is_done(folder, last, steps)


def is_done(folder: Path, done: int, steps: int) -> str:
    """What is said of a run that has nothing left to train."""
    return f"{folder} is done: {done} of {steps} steps; raise training.steps to train on"


def stage_folders(folder: Path, holding: str = "checkpoints/step_*") -> list[Path]:
    """The runs inside the folder of an up-training, in order; empty for any other folder.

    holding: what a run has in it that counts, by default a checkpoint.
    """
    numbers = {path: path.name.partition("-")[0] for path in folder.glob("*-*")}
    found = [path for path, number in numbers.items() if number.isdigit() and any(path.glob(holding))]
    return sorted(found, key=lambda path: int(numbers[path]))


BLOCK = "layers_"
"""Beginning of the names of a block's run in the folder of a stage that takes layers block by block."""


def block_folders(stage: Path) -> list[Path]:
    """The runs of a stage's blocks of layers that have begun, in order; empty for any other folder."""
    found = [file.parent for file in stage.glob(f"{BLOCK}*-*/config.yaml")]
    return sorted(found, key=lambda path: int(path.name.removeprefix(BLOCK).partition("-")[0]))


_CONTROLS = ("-scratch", "-dense")
"""Ends of the names of stages that are trained for comparison alone."""


def student(folder: Path) -> Path:
    """The run of an up-training's student: its last stage that is finished, controls apart.

    `folder` itself where it is a run, or has no such stage.
    """
    if (folder / "checkpoints").is_dir():
        return folder
    for stage in reversed(stage_folders(folder)):
        if stage.name.endswith(_CONTROLS):
            continue
        with suppress(UserError):  # of one that cannot be used; what there is instead is said where none can
            run = TrainedRun.find(stage)
            if run.checkpoint.step >= run.config.training.steps:
                return stage
    return folder


def _stages_instead(folder: Path) -> str | None:
    stages = ", ".join(map(str, stage_folders(folder)))
    return f"it is an up-training: give the run of a stage, {stages}" if stages else None


def _at_step(root: Path, step: int) -> Checkpoint:
    try:
        return Checkpoint.verified(root / f"step_{step}", Ranks())
    except ValueError as error:
        others = sorted(s for path in root.glob("step_*") if (s := step_of(path)) is not None and s != step)
        choice = f"choose one of {', '.join(map(str, others))}" if others else "the run has no other yet"
        choice = _stages_instead(root.parent) or choice
        reason = f"cannot be used ({error})" if (root / f"step_{step}").is_dir() else "has no checkpoint"
        raise UserError(f"step {step} of {root.parent} {reason}; {choice}") from None


def _runs_beside(folder: Path) -> str:
    runs = [str(path.parent) for path in folder.parent.glob("*/config.yaml")]
    choice = f"choose one of {nearest_first(str(folder), runs, most=5)}"
    return choice if runs else "make one with `megakernel pretrain CONFIG`"


def run_of(folder: Path) -> Path:
    """The run of a checkpoint's folder; any other folder itself."""
    above = folder.resolve().parent
    return above.parent if above.name == "checkpoints" else folder


def tokenizer_folder(run: Path) -> Path:
    """Where a run keeps its tokenizer."""
    return run / "tokenizer"
