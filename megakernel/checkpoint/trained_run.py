"""Lookup of runs and their checkpoints. It does not import torch, so that errors come at once."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel.config import Config, UserError, from_yaml, yaml_text
from megakernel.config.errors import nearest_first
from megakernel.config.section import Section
from megakernel.parallel.ranks import Ranks

from .folder import CheckpointFolder
from .manifest import SavedCheckpoint, step_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainedRun:
    """A run's configuration and one of its checkpoints."""

    config: Config
    """The configuration of the run."""

    checkpoint: SavedCheckpoint
    """The chosen checkpoint, verified."""

    @classmethod
    def find(cls, folder: Path, step: int | None = None) -> "TrainedRun":
        """Find the run in `folder`, at a step or at its newest good checkpoint.

        Raises UserError if the folder is no run's, and as `find_checkpoint` does.
        """
        if not (folder / "config.yaml").is_file():
            raise UserError(
                f"{folder} is not the folder of a run (it has no config.yaml); {_runs_beside(folder)}"
            )
        return cls(recorded_config(folder), find_checkpoint(folder, step))


def recorded_config(folder: Path) -> Config:
    """The configuration of a run, with relative paths resolved against the folder in which the run was started.

    That is the folder in which run.root/run.name is the run's folder; the two may have been moved together since. If
    run.root is absolute, or the run was moved out of it, paths stay relative to the working directory.
    """
    file = folder / "config.yaml"
    config = from_yaml(yaml_text.read_text(file), str(file))
    location, recorded = folder.resolve(), config.run.folder
    if recorded.is_absolute() or location.parts[-len(recorded.parts) :] != recorded.parts:
        return config
    start = location.parents[len(recorded.parts) - 1]
    if start == Path.cwd():
        return config
    return _resolve_paths(start, config).model_copy(update={"run": config.run})


def _resolve_paths(start: Path, value: Any) -> Any:
    if isinstance(value, Path):
        return start / value
    if isinstance(value, list):
        return [_resolve_paths(start, item) for item in value]
    if isinstance(value, Section):
        return value.model_copy(
            update={name: _resolve_paths(start, getattr(value, name)) for name in type(value).model_fields}
        )
    return value


def find_checkpoint(folder: Path, step: int | None = None, ranks: Ranks | None = None) -> SavedCheckpoint:
    """Find the checkpoint of a run at a step, or its newest good one; newer broken ones are logged.

    ranks: the ranks that verify it together; None: only this process.
    Raises UserError if the run has not saved yet, the step has no checkpoint, or none is good.
    """
    root = folder / "checkpoints"
    if step is not None:
        return _at_step(root, step)
    search = CheckpointFolder(root, keep=1, ranks=ranks).newest_good()
    for path, reason in search.broken.items() if ranks is None or ranks.rank == 0 else ():
        _log.warning("%s cannot be used (%s); taking the one before", path, reason)
    if search.checkpoint is None:
        remedy = _stages_instead(folder) or "let its run train on until it saves one (checkpoint.every)"
        raise UserError(f"{folder} has no checkpoint; {remedy}")
    return search.checkpoint


def finished_message(config: Config) -> str | None:
    """`done_message` of a run whose last step has a good checkpoint; None if there is training left."""
    folder, steps = config.run.folder, config.training.steps
    root = folder / "checkpoints"
    last = max((step_of(path) or 0 for path in root.glob("step_*")), default=0)
    if last < steps:
        return None
    try:
        checkpoint = SavedCheckpoint.read(root / f"step_{last}")
        for name, record in checkpoint.files.items():
            record.compare(checkpoint.folder / name, name)
    except (UserError, OSError):  # the run's next start reports it and uses the checkpoint before
        return None
    return done_message(folder, last, steps)


def done_message(folder: Path, done: int, steps: int) -> str:
    """Message for a run that has nothing left to train."""
    return f"{folder} is done: {done} of {steps} steps; raise training.steps to train on"


def stage_folders(folder: Path, containing: str = "checkpoints/step_*") -> list[Path]:
    """The stages' runs in the folder of an up-training, in order; empty for any other folder.

    containing: glob pattern of what a run must contain, by default a checkpoint.
    """
    numbers = {path: path.name.partition("-")[0] for path in folder.glob("*-*")}
    stages = [path for path, number in numbers.items() if number.isdigit() and any(path.glob(containing))]
    return sorted(stages, key=lambda path: int(numbers[path]))


BLOCK_PREFIX = "layers_"
"""Prefix of the name of a block's run, in the folder of a stage that trains blocks of layers."""


def block_folders(stage: Path) -> list[Path]:
    """The started runs of a stage's blocks of layers, in order; empty for any other folder."""
    blocks = [file.parent for file in stage.glob(f"{BLOCK_PREFIX}*-*/config.yaml")]
    return sorted(blocks, key=lambda path: int(path.name.removeprefix(BLOCK_PREFIX).partition("-")[0]))


DENSE = "dense"
"""Kind of the stage that trains the dense model further."""

CONTROLS = ("scratch", DENSE)
"""Kinds of stages that are trained only for comparison; the folder of a stage is NUMBER-KIND."""


def student_run(folder: Path) -> Path:
    """The run of an up-training's student: its last finished stage, except for controls.

    `folder` itself if it is a run, or has no such stage.
    """
    if (folder / "checkpoints").is_dir():
        return folder
    for stage in reversed(stage_folders(folder)):
        if stage.name.partition("-")[2] in CONTROLS:
            continue
        with suppress(UserError):  # the stage is unusable; if all are, opening `folder` raises a better error
            run = TrainedRun.find(stage)
            if run.checkpoint.step >= run.config.training.steps:
                return stage
    return folder


def _stages_instead(folder: Path) -> str | None:
    stages = ", ".join(map(str, stage_folders(folder)))
    return f"it is an up-training: give the run of a stage, {stages}" if stages else None


def _at_step(root: Path, step: int) -> SavedCheckpoint:
    try:
        return SavedCheckpoint.verified(root / f"step_{step}", Ranks())
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
    """The run that a checkpoint's folder belongs to; any other folder itself."""
    above = folder.resolve().parent
    return above.parent if above.name == "checkpoints" else folder


def tokenizer_folder(run: Path) -> Path:
    """The folder of a run's tokenizer."""
    return run / "tokenizer"
