"""RUN/checkpoints: atomic saves, the newest good checkpoint, and pruning."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from megakernel.config import RunFailed, UserError
from megakernel.config.errors import existing_parent
from megakernel.parallel.ranks import RankFailed, Ranks

from .manifest import (
    Damaged,
    SavedCheckpoint,
    SavedFile,
    SavedProgress,
    flush,
    flushed,
    step_of,
    write_manifest,
)

PARTIAL = ".partial"
LATEST = "latest"


class SaveFailed(RunFailed):
    """A checkpoint could not be written; earlier ones are untouched."""


@dataclass(frozen=True)
class CheckpointSearch:
    """The result of a search for the newest good checkpoint."""

    checkpoint: SavedCheckpoint | None
    """The newest good checkpoint; None if there are no checkpoints."""

    broken: dict[Path, str]
    """Newer folders that were skipped -> reason."""


class CheckpointFolder:
    """The checkpoints of one run. All ranks must call the same methods in the same order.

    root: RUN/checkpoints, on a file system that all ranks share.
    keep: how many of the newest checkpoints to keep; keep_every: multiples of this step are never pruned.
    """

    def __init__(self, root: Path, keep: int, keep_every: int | None = None, ranks: Ranks | None = None):
        self.root = root
        self._keep = keep
        self._keep_every = keep_every
        self._ranks = ranks or Ranks()
        self._broken: set[Path] = set()

    def remove_leftovers(self) -> list[Path]:
        """Delete what interrupted saves and prunings left behind; called once, before training."""
        return self._ranks.on_rank_zero(self._remove_leftovers)

    def newest_good(self) -> CheckpointSearch:
        """Find the newest checkpoint that is complete and undamaged, and the broken ones that are newer.

        Every rank verifies a share of its files, and all ranks agree on the result.
        Raises UserError if there are checkpoints and none is good: the user must decide to start over.
        """
        broken: dict[Path, str] = {}
        # Listed anew each time, because a run that is training may replace a checkpoint while it is verified.
        while untried := [pair for pair in self._ranks.on_rank_zero(self._steps) if pair[1] not in broken]:
            step, folder = untried[0]
            try:
                found = SavedCheckpoint.verified(folder, self._ranks)
            except UserError as error:
                broken[folder] = str(error)
                self._broken.add(folder)
                continue
            newer = {path: reason for path, reason in broken.items() if (step_of(path) or 0) > step}
            return CheckpointSearch(found, newer)
        if broken:
            reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in broken.items())
            raise UserError(
                f"no checkpoint in {self.root} can be used ({reasons}); restore one, or delete these folders "
                "to start the run from its first step"
            )
        return CheckpointSearch(None, broken)

    def save(
        self,
        progress: SavedProgress,
        write: Callable[[Path], object],
        written: Callable[[], Iterable[Path]] = tuple,
        prune: bool = True,
    ) -> Path:
        """Save a checkpoint and return its folder; a good checkpoint of the same step is left as it is.

        write: called on every rank with the folder to fill, which exists. It must return or raise on every rank even if
        one of them cannot write.
        written: returns the files that `write` wrote on this rank, which checksums them from its page cache; rank 0
        reads all other files from the file server.
        prune: delete old checkpoints now; otherwise the next save does.
        Raises SaveFailed, alike on all ranks; earlier checkpoints and `latest` are then untouched.
        """
        final = self.root / f"step_{progress.step}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            if self._ranks.on_rank_zero(lambda: self._prepare(final, partial)):
                shares = self._ranks.all(lambda: (write(partial), flushed(partial, written()))[1])
                self._ranks.on_rank_zero(lambda: self._publish(partial, final, progress, shares))
        except OSError as error:
            reason = str(error) if isinstance(error, RankFailed) else f"rank 0: {error}"
            raise SaveFailed(self._ranks.on_rank_zero(lambda: self._clean_up(final.name, reason))) from None
        if prune:
            self._ranks.on_rank_zero(lambda: self._prune(progress.step))
        return final

    def _remove_leftovers(self) -> list[Path]:
        leftovers = sorted(self.root.glob(f"*{PARTIAL}"))
        for path in leftovers:
            _remove(path)
        return leftovers

    def _prepare(self, final: Path, partial: Path) -> bool:
        """Make the folder to write into; False if the step is saved already."""
        if self._is_good(final):
            self._stage_latest(final).replace(self.root / LATEST)
            return False
        _remove(partial)
        partial.mkdir(parents=True)
        return True

    def _publish(
        self, partial: Path, final: Path, progress: SavedProgress, shares: Iterable[dict[str, SavedFile]]
    ) -> None:
        """Turn the written folder into a checkpoint. Everything that needs disk space comes before the first rename."""
        files = {name: record for share in shares for name, record in share.items()}
        files |= flushed(partial, _unrecorded_files(partial, files))
        flush(write_manifest(partial, progress, files))
        for folder, _, _ in os.walk(partial):
            flush(Path(folder))
        latest = self._stage_latest(final)
        _remove(final)
        partial.rename(final)
        self._broken.discard(final)
        latest.replace(self.root / LATEST)
        flush(self.root)

    def _stage_latest(self, final: Path) -> Path:
        staged = self.root / (LATEST + PARTIAL)
        staged.write_text(final.name)
        flush(staged)
        return staged

    def _clean_up(self, name: str, reason: str) -> str:
        """Remove what was written and return the error message."""
        free = shutil.disk_usage(existing_parent(self.root)).free
        self._remove_leftovers()
        return (
            f"checkpoint {name} could not be saved in {self.root} ({free / 2**20:,.0f} MiB free): {reason}. "
            "Earlier checkpoints are untouched; free space or make the folder writable, then start the same "
            "command again to continue"
        )

    def _prune(self, saved: int) -> None:
        """Keep the newest good checkpoints and multiples of keep_every. Steps after `saved` are broken, and stay."""
        kept = 0
        for step, folder in self._steps():
            if step > saved:
                continue
            if kept < self._keep and self._is_good(folder):
                kept += 1
            elif self._keep_every is None or step % self._keep_every:
                _remove(folder)

    def _is_good(self, folder: Path) -> bool:
        """Whether file sizes are right and no damage was found since the start."""
        try:
            SavedCheckpoint.read(folder)
        except Damaged:
            return False
        return folder not in self._broken

    def _steps(self) -> list[tuple[int, Path]]:
        """(N, folder step_N), newest first."""
        steps = ((step_of(path), path) for path in self.root.glob("step_*"))
        return sorted(((step, path) for step, path in steps if step is not None), reverse=True)


def _unrecorded_files(folder: Path, known: Iterable[str]) -> list[Path]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return [files[name] for name in sorted(files.keys() - known)]


def make_empty(folder: Path) -> None:
    """Delete a folder with everything in it, and create it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def free_name(path: Path, suffix: str, ending: str = "") -> Path:
    """The first free name of `path` with the suffix, a number from the second on, and the ending."""
    names = (path.with_name(f"{path.name}{suffix}{number or ''}{ending}") for number in count())
    return next(name for name in names if not name.exists())


def _remove(path: Path) -> None:
    """Delete a file or folder if it exists. A checkpoint is renamed first, so an interruption leaves no partial one."""
    if path.is_dir() and not path.name.endswith(PARTIAL):
        path = path.rename(free_name(path, ".removed", PARTIAL))
    if path.is_dir():
        # Network file systems keep a file while somebody reads it; the next start removes it.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
