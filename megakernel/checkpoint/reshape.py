"""Conversion of checkpoints of any layout and ZeRO stage to DeepSpeed's universal format.

DeepSpeed's own converter and loaders do not support ZeRO 0, lose Adam's step with ZeRO 3, take buffers only from the
first tensor rank, and need an unchanged number of pipeline stages. So Megakernel converts and loads by itself, in the
same format; a test compares the files in cases that both support.
"""

import logging
import shutil
from contextlib import ExitStack, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from megakernel.config import UserError
from megakernel.parallel.ranks import RankFailed, Ranks

from .files import CheckpointTensors
from .folder import PARTIAL, SaveFailed, make_empty
from .manifest import MANIFEST, SavedCheckpoint, SavedFile, flushed, read_manifest, verify, write_manifest
from .trained_run import find_checkpoint
from .universal import UniversalFolder

_log = logging.getLogger(__name__)

UNIVERSAL = "universal"
"""Folder of the universal form inside of a checkpoint, with which it is pruned."""


def reshape_run(run: Path, step: int | None = None) -> Path:
    """Convert a run's newest good checkpoint, or that of a step; return the folder of its universal form.

    A run does this by itself when it continues on another layout; doing it beforehand saves device time.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
        SaveFailed: the converted tensors could not be written.
    """
    return reshape(find_checkpoint(run, step), Ranks())


def reshape(checkpoint: SavedCheckpoint, ranks: Ranks) -> Path:
    """Convert a checkpoint, a share of its tensors on each rank; return the folder of its universal form.

    An earlier conversion is reused if it is undamaged; one that another process is making is waited for.
    """
    with ExitStack() as stack:
        ranks.on_rank_zero(lambda: _lock(checkpoint, stack))
        return _reshape(checkpoint, ranks)


def _lock(checkpoint: SavedCheckpoint, stack: ExitStack) -> None:
    """Lock a checkpoint's manifest until the stack is closed, so that one process at a time converts it."""
    with suppress(OSError):  # a read-only folder, or a file system without locks
        manifest = stack.enter_context((checkpoint.folder / MANIFEST).open("r+"))
        try:
            flock(manifest, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            _log.warning("another process converts %s; waiting for it", checkpoint.folder)
            flock(manifest, LOCK_EX)


def _reshape(checkpoint: SavedCheckpoint, ranks: Ranks) -> Path:
    final = checkpoint.folder / UNIVERSAL
    if ranks.on_rank_zero(final.is_dir):
        try:
            files = ranks.on_rank_zero(lambda: read_manifest(final)[1])
            verify(final, files, ranks)
            return final
        except UserError as error:
            if ranks.rank == 0:
                _log.warning("%s cannot be used (%s); converting %s again", final, error, checkpoint.folder)
    partial = final.with_name(final.name + PARTIAL)
    try:
        ranks.on_rank_zero(lambda: make_empty(partial))
        shares = ranks.all(lambda: _convert(checkpoint, partial, ranks.rank, ranks.size))
        ranks.on_rank_zero(lambda: _publish(partial, final, shares))
    except OSError as error:
        reason = str(error) if isinstance(error, RankFailed) else f"rank 0: {error}"
        ranks.on_rank_zero(lambda: shutil.rmtree(partial, ignore_errors=True))
        raise SaveFailed(
            f"{checkpoint.folder} could not be converted for another layout: {reason}. The checkpoint is untouched; "
            "free space or make the folder writable, then start the same command again"
        ) from None
    return final


def _convert(checkpoint: SavedCheckpoint, folder: Path, rank: int, size: int) -> dict[str, SavedFile]:
    """Write this rank's share of the tensors; return the files' records."""
    tensors, universal = CheckpointTensors(checkpoint), UniversalFolder(folder)
    written: list[Path] = []
    if rank == 0:
        written.append(universal.write_counters(tensors.counters))
    for name in sorted(tensors.names)[rank::size]:
        written += universal.write(name, tensors.read(name), tensors.partition(name))
    return flushed(folder, written)


def _publish(partial: Path, final: Path, shares: list[dict[str, SavedFile]]) -> None:
    write_manifest(partial, None, {name: record for share in shares for name, record in share.items()})
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
