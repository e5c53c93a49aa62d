"""Where a start of a run begins: its newest good checkpoint, or the first step."""

from collections.abc import Callable

from megakernel.config import Config

from .checkpoint_folder import CheckpointFolder
from .engine import Engine


def resume(engine: Engine, checkpoints: CheckpointFolder, config: Config, note: Callable[[str], None]) -> int:
    """Load the newest good checkpoint, if any; returns the steps it has behind it."""
    checkpoints.remove_leftovers()
    found = checkpoints.newest_good()
    for folder, reason in found.broken.items():
        note(f"{folder} cannot be used ({reason}); taking the one before")
    if found.checkpoint is None:
        return 0
    engine.load(found.checkpoint.folder)
    note(f"continuing from {found.checkpoint.folder}")
    return found.checkpoint.step
