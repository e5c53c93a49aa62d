"""RUN/checkpoints: saves that leave a whole checkpoint or none, the newest good one, and pruning."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megakernel.config import RunFailed, UserError
from megakernel.parallel.ranks import RankFailed, Ranks

from .manifest import Checkpoint, Damaged, FileRecord, SavedProgress, flush, flushed, step_of, write_manifest

PARTIAL = ".partial"
LATEST = "latest"


class SaveFailed(RunFailed):
    """A checkpoint could not be written; those before it are untouched."""


@dataclass(frozen=True)
class Found:
    """What lies in a checkpoint folder."""

    checkpoint: Checkpoint | None
    """The newest good checkpoint; None where there is none at all."""

    broken: dict[Path, str]
    """Newer folders that were passed over -> reason."""


class CheckpointFolder:
    """The checkpoints of one run. Every rank holds one and calls the same methods in the same order.

    root: RUN/checkpoints, on a file system that all ranks share.
    keep: newest checkpoints that are kept; keep_every: multiples of this step are kept for good.
    """

    def __init__(self, root: Path, keep: int, keep_every: int | None = None, ranks: Ranks | None = None):
        self.root = root
        self._keep = keep
        self._keep_every = keep_every
        self._ranks = ranks or Ranks()
        self._broken: set[Path] = set()

    def remove_leftovers(self) -> list[Path]:
        """Delete what saves and prunings that were killed left behind; called once, before training."""
        return self._ranks.first(self._remove_leftovers)

    def newest_good(self) -> Found:
        """Find the newest checkpoint that is whole, and the broken ones that are newer.

        Every rank reads a share of its files, and all take the same one.
        Raises UserError where there are checkpoints and none is good: the user must choose to start over.
        """
        broken: dict[Path, str] = {}
        for _, folder in self._ranks.first(self._steps):
            try:
                return Found(Checkpoint.verified(folder, self._ranks), broken)
            except UserError as error:
                broken[folder] = str(error)
                self._broken.add(folder)
        if broken:
            reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in broken.items())
            raise UserError(
                f"no checkpoint in {self.root} can be used ({reasons}); restore one, or delete these folders "
                "to start the run from its first step"
            )
        return Found(None, broken)

    def save(
        self,
        progress: SavedProgress,
        write: Callable[[Path], object],
        written: Callable[[], Iterable[Path]] = tuple,
        prune: bool = True,
    ) -> Path:
        """Save a checkpoint and give its folder; a good one of the same step is left as it is.

        prune: delete those that are too old; else they wait for the next save.
        write: called on every rank with the folder to fill (it exists). It must return or raise on every
        rank even where one of them cannot write.
        written: names the files that `write` has written on this rank, which will not have to ask a file server for
        them; what no rank names is read again on rank 0.
        Raises SaveFailed, alike on all ranks; what was saved before, and `latest`, are then untouched.
        """
        final = self.root / f"step_{progress.step}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            if self._ranks.first(lambda: self._prepare(final, partial)):
                shares = self._ranks.all(lambda: (write(partial), flushed(partial, written()))[1])
                self._ranks.first(lambda: self._publish(partial, final, progress, shares))
        except OSError as error:
            reason = str(error) if isinstance(error, RankFailed) else f"rank 0: {error}"
            raise SaveFailed(self._ranks.first(lambda: self._give_up(final.name, reason))) from None
        if prune:
            self._ranks.first(lambda: self._prune(progress.step))
        return final

    def _remove_leftovers(self) -> list[Path]:
        leftovers = sorted(self.root.glob(f"*{PARTIAL}"))
        for path in leftovers:
            _remove(path)
        return leftovers

    def _prepare(self, final: Path, partial: Path) -> bool:
        """Make the folder to write into; False where the step is saved already."""
        if self._is_good(final):
            self._stage_latest(final).replace(self.root / LATEST)
            return False
        _remove(partial)
        partial.mkdir(parents=True)
        return True

    def _publish(
        self, partial: Path, final: Path, progress: SavedProgress, shares: Iterable[dict[str, FileRecord]]
    ) -> None:
        """Make the written folder a checkpoint. All that needs space is written before the first rename."""
        files = {name: record for share in shares for name, record in share.items()}
        files |= flushed(partial, _others(partial, files))
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

    def _give_up(self, name: str, reason: str) -> str:
        """Remove what was written; the error's text."""
        free = shutil.disk_usage(next(path for path in (self.root, *self.root.parents) if path.exists())).free
        self._remove_leftovers()
        return (
            f"checkpoint {name} could not be saved in {self.root} ({free / 2**20:,.0f} MiB free): {reason}. "
            "Earlier checkpoints are untouched; free space or make the folder writable, then start the same "
            "command again to continue"
        )

    def _prune(self, saved: int) -> None:
        """Keep the newest good checkpoints and multiples of keep_every; those after `saved` are broken."""
        kept = 0
        for step, folder in self._steps():
            if step > saved:
                continue
            if kept < self._keep and self._is_good(folder):
                kept += 1
            elif self._keep_every is None or step % self._keep_every:
                _remove(folder)

    def _is_good(self, folder: Path) -> bool:
        """By its sizes, and by what was read of it since the start."""
        try:
            Checkpoint.read(folder)
        except Damaged:
            return False
        return folder not in self._broken

    def _steps(self) -> list[tuple[int, Path]]:
        """(N, folder step_N), newest first."""
        found = ((step_of(path), path) for path in self.root.glob("step_*"))
        return sorted(((step, path) for step, path in found if step is not None), reverse=True)


def _others(folder: Path, known: Iterable[str]) -> list[Path]:
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return [files[name] for name in sorted(files.keys() - known)]


def _remove(path: Path) -> None:
    """Delete a file or folder, if there; a checkpoint loses its name first, so a kill leaves no half."""
    if path.is_dir() and not path.name.endswith(PARTIAL):
        path = path.rename(path.with_name(path.name + ".removed" + PARTIAL))
    if path.is_dir():
        # Network file systems keep a file that someone still reads; the next start removes it.
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
