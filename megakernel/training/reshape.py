"""Checkpoints in DeepSpeed's universal format, made from those of any layout and ZeRO stage.

DeepSpeed brings a converter and loaders of its own. They know nothing of ZeRO 0, drop Adam's step where ZeRO 3 wrote
it, and want as many pipeline stages as before; so Megakernel converts and loads by itself, in the same format.
"""

import shutil
from pathlib import Path

from megakernel.config import UserError

from .checkpoint import Checkpoint, step_of
from .checkpoint_files import ModelRank
from .checkpoint_folder import PARTIAL, CheckpointFolder, SaveFailed
from .ranks import RankFailed, Ranks
from .universal import STEP, write_counters, write_tensor

UNIVERSAL = "universal"
"""The folder of the universal form inside a checkpoint; it lives and goes with the checkpoint."""


def reshape_run(run: Path, step: int | None = None) -> Path:
    """Convert a run's newest good checkpoint, or that of a step; the folder of its universal form.

    A run does this by itself when it is continued on another layout. Doing it before spares the devices the wait.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
        SaveFailed: the disk did not take the converted tensors.
    """
    return reshape(find_checkpoint(run, step), Ranks())


def find_checkpoint(run: Path, step: int | None = None) -> Checkpoint:
    """A run's newest good checkpoint, or that of a step; UserError where there is none."""
    root = run / "checkpoints"
    if step is None:
        newest = CheckpointFolder(root, keep=1).newest_good().checkpoint
        if newest is None:
            raise UserError(f"{run} has no checkpoint; give the folder of a run that has saved one")
        return newest
    try:
        return Checkpoint.read(root / f"step_{step}")
    except ValueError as error:
        steps = sorted(found for path in root.glob("step_*") if (found := step_of(path)) is not None)
        raise UserError(f"step {step} of {run} cannot be used ({error}); its checkpoints: {steps}") from None


def reshape(checkpoint: Checkpoint, ranks: Ranks, into: Path | None = None) -> Path:
    """Convert a checkpoint, every rank a share of its tensors; the folder of its universal form.

    What was converted before is used again. into: a folder on a disk that all ranks share, where not in the
    checkpoint itself.
    """
    final = checkpoint.folder / UNIVERSAL
    if ranks.first(final.is_dir):
        return final
    final = into or final
    partial = final.with_name(final.name + PARTIAL)
    try:
        ranks.first(lambda: _empty(partial))
        ranks.all(lambda: _convert(checkpoint, partial, ranks.rank, ranks.size))
        ranks.first(lambda: partial.rename(final))
    except OSError as error:
        reason = str(error) if isinstance(error, RankFailed) else f"rank 0: {error}"
        ranks.first(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise SaveFailed(
            f"{checkpoint.folder} could not be converted for another layout: {reason}. The checkpoint is untouched; "
            "free space or make the folder writable, then start the same command again"
        ) from None
    return final


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _convert(checkpoint: Checkpoint, folder: Path, rank: int, size: int) -> None:
    """Write this rank's share of the tensors."""
    layout = checkpoint.progress.layout
    stages = [
        [ModelRank(checkpoint, stage, tensor) for tensor in range(layout["tensor"])]
        for stage in range(layout["pipeline"])
    ]
    if rank == 0:
        write_counters(folder, stages[0][0].counters)
    # A tied embedding lies on the first and on the last stage: either copy will do.
    homes = {name: tensor_ranks for tensor_ranks in stages for name in tensor_ranks[0].cuts}
    for name in sorted(homes)[rank::size]:
        cut = homes[name][0].cuts[name]
        pieces = [tensor_rank.state(name) for tensor_rank in homes[name]]
        whole = {
            key: tensor if key == STEP else cut.join([piece[key] for piece in pieces])
            for key, tensor in pieces[0].items()
        }
        write_tensor(folder, name, whole, cut)
