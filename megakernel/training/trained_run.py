"""A run as one finds it: its configuration and one of its checkpoints. Loads no torch, so that errors come at once."""

import logging
from dataclasses import dataclass
from pathlib import Path

from megakernel.config import Config, UserError, from_yaml

from .checkpoint import Checkpoint, step_of
from .checkpoint_folder import CheckpointFolder
from .ranks import Ranks

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
        config_file = folder / "config.yaml"
        if not config_file.is_file():
            raise UserError(
                f"{folder} is not the folder of a run (it has no config.yaml); {_runs_beside(folder)}"
            )
        config = from_yaml(config_file.read_text(encoding="utf-8"), str(config_file))
        return cls(config, find_checkpoint(folder, step))


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


def stage_folders(folder: Path) -> list[Path]:
    """The runs inside the folder of an up-training that have saved, its main stages first, the last before others.

    Empty for any other folder.
    """
    saved = {
        path: int(number)
        for path in folder.glob("*-*")
        if (number := path.name.partition("-")[0]).isdigit() and any(path.glob("checkpoints/step_*"))
    }
    return sorted(saved, key=lambda path: (path.name.endswith(_WANTED), saved[path]), reverse=True)


_WANTED = ("-main", "-length")
"""Ends of the names of stages that train the model of the up-training's configuration."""


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
    runs = sorted(str(path.parent) for path in folder.parent.glob("*/config.yaml"))
    return f"choose one of {', '.join(runs)}" if runs else "make one with `megakernel pretrain CONFIG`"
