"""Where a start of a run begins: its newest good checkpoint, weights of another run, or the first step."""

from collections.abc import Callable
from pathlib import Path

from megakernel.config import UserError

from .checkpoint import Checkpoint
from .checkpoint_files import CheckpointTensors
from .checkpoint_folder import CheckpointFolder
from .engine import Engine
from .ranks import Ranks
from .reshape import reshape
from .trained_run import find_checkpoint

Note = Callable[[str], None]


def resume(
    engine: Engine, checkpoints: CheckpointFolder, layout: dict[str, int], ranks: Ranks, note: Note
) -> int:
    """Load the newest good checkpoint, if any, whatever layout wrote it; returns the steps it has behind it."""
    for leftover in checkpoints.remove_leftovers():
        note(f"removed {leftover}, which was not written to its end")
    found = checkpoints.newest_good()
    for folder, reason in found.broken.items():
        note(f"{folder} cannot be used ({reason}); taking the one before")
    if found.checkpoint is None:
        return 0
    folder, written = found.checkpoint.folder, found.checkpoint.progress.layout
    if written == layout:
        engine.load(folder)
    else:
        changes = [f"{key} {written[key]} -> {layout[key]}" for key in layout if written[key] != layout[key]]
        note(f"reshaping {folder}: {', '.join(changes)}")
        engine.load_universal(reshape(found.checkpoint, ranks))
    note(f"continuing from {folder}")
    return found.checkpoint.step


def start_from_weights(source: Path, engine: Engine, ranks: Ranks, note: Note) -> None:
    """Take the weights alone, from a run's newest good checkpoint or from a checkpoint folder, of any layout.

    Says which weights stay as they were drawn, and which were left out.
    Raises UserError, alike on all ranks, where there is no checkpoint or shapes do not fit.
    """
    checkpoint = ranks.first(lambda: _source(source))
    comparison = engine.load_weights(CheckpointTensors(checkpoint))
    if comparison.misshapen:
        remedy = "give the model the checkpoint's sizes, or choose another checkpoint"
        lines = [f"checkpoint.weights_from={source}: {line}; {remedy}" for line in comparison.misshapen]
        raise UserError("\n".join(lines))
    note(f"weights from {checkpoint.folder}")
    for names, what in (
        (comparison.missing, "missing there and new here"),
        (comparison.unexpected, "left out"),
    ):
        if names:
            note(f"{len(names)} weights {what}: {', '.join(names)}")


def _source(path: Path) -> Checkpoint:
    if (path / "checkpoints").is_dir():
        return find_checkpoint(path)
    try:
        return Checkpoint.read(path)
    except ValueError as error:
        raise UserError(
            f"checkpoint.weights_from={path} is no run and no good checkpoint ({error}); give a folder such as "
            "runs/NAME or runs/NAME/checkpoints/step_N"
        ) from None
