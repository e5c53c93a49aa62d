"""RUN/checkpoints: atomic saves, the newest good checkpoint, and pruning."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Any

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


Records = Mapping[str, SavedFile]
"""Records of files by name relative to the checkpoint's folder."""


class SaveState(IntEnum):
    """What a rank does for a save; the greatest of all ranks' states applies to all."""

    READY = 0
    """Nothing: there is no save, or its next part may begin."""

    WRITING = 1
    FAILED = 2


class _Part(IntEnum):
    """The parts of a save: all ranks write, then rank 0 publishes and prunes."""

    WRITE = 0
    PUBLISH = 1
    PRUNE = 2


@dataclass
class _Save:
    """A save that has begun."""

    progress: SavedProgress
    prunes: bool
    in_background: bool
    part: _Part
    work: "Future[Any]"
    """What this rank does for the part."""


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
        self._save: _Save | None = None

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
        write: Callable[[Path], Records | None],
        prune: bool = True,
    ) -> Path:
        """Save a checkpoint and return its folder; a good checkpoint of the same step is left as it is.

        write: called on every rank with the folder to fill, which exists. It must return or raise on every rank even if
        one of them cannot write. It returns records of flushed files; rank 0 flushes and reads all other files.
        prune: delete old checkpoints now; otherwise the next save does.
        Raises SaveFailed, alike on all ranks; earlier checkpoints and `latest` are then untouched.
        """

        def stage(folder: Path) -> Callable[[], Records]:
            records = write(folder) or {}
            return lambda: records

        self.begin(progress, stage, prune, in_background=False)
        self.finish()
        return self.root / f"step_{progress.step}"

    def begin(
        self,
        progress: SavedProgress,
        stage: Callable[[Path], Callable[[], Records]],
        prune: bool = True,
        in_background: bool = True,
    ) -> None:
        """Begin a save like `save`, after the one before has finished; `advance` and `finish` go on with it.

        stage: called on every rank with the folder to fill. It copies what will change and returns the function that
        writes: with no collectives, because a thread calls it if the save is `in_background`.
        Raises SaveFailed as `save` does, also for the save before.
        """
        self.finish()
        final, partial = self._folders(progress)
        writes: list[Callable[[], Records]] = []
        try:
            if self._ranks.on_rank_zero(lambda: self._prepare(final, partial)):
                self._ranks.all(lambda: writes.append(stage(partial)))
        except OSError as error:
            raise self._failure(progress, error) from None
        self._save = _Save(progress, prune, in_background, _Part.WRITE, Future())
        if writes:
            self._save.work = self._start(writes[0])
        else:
            self._begin_pruning(self._save)

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not complete; the same on all ranks."""
        return self._save is not None

    @property
    def state(self) -> SaveState:
        """What this rank does now. `advance` takes the greatest of all ranks' states."""
        if self._save is None:
            return SaveState.READY
        if not self._save.work.done():
            return SaveState.WRITING
        return SaveState.FAILED if self._save.work.exception() else SaveState.READY

    def advance(self, agreed: SaveState = SaveState.FAILED) -> SavedProgress | None:
        """Go on to the next part of a save, if there is one; returns the progress that is now saved, if any.

        agreed: the greatest `state` of all ranks. While one is WRITING nothing is done. If all are READY nothing waits;
        otherwise each rank first ends its work.
        Raises SaveFailed, alike on all ranks.
        """
        save = self._save
        if save is None or agreed is SaveState.WRITING:
            return None
        try:
            if save.part is _Part.WRITE:
                shares = self._ranks.all(save.work.result)
                save.part = _Part.PUBLISH
                save.work = self._on_rank_zero(lambda: self._publish(save.progress, shares))
                return None
            if save.part is _Part.PUBLISH:
                self._ranks.on_rank_zero(save.work.result)
        except OSError as error:
            self._save = None
            raise self._failure(save.progress, error) from None
        if save.part is _Part.PUBLISH:
            self._begin_pruning(save)
            return save.progress
        self._save = None
        self._ranks.on_rank_zero(save.work.result)
        return None

    def finish(self) -> SavedProgress | None:
        """Wait until a save that has begun is complete; returns its progress if that was not returned before."""
        saved = None
        while self._save is not None:
            saved = self.advance() or saved
        return saved

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

    def _folders(self, progress: SavedProgress) -> tuple[Path, Path]:
        """The folder of a step's checkpoint, and the one that it is written into."""
        final = self.root / f"step_{progress.step}"
        return final, final.with_name(final.name + PARTIAL)

    def _start(self, action: Callable[[], Any]) -> "Future[Any]":
        """Do this rank's work of a part of the save, in a thread if it is in the background."""
        assert self._save is not None
        if self._save.in_background:
            # A thread of its own: one that lives on keeps the states that it has written, and the model with them.
            thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            work: Future[Any] = thread.submit(action)
            thread.shutdown(wait=False)
            return work
        work = Future()
        try:
            work.set_result(action())
        except Exception as error:
            work.set_exception(error)
        return work

    def _on_rank_zero(self, action: Callable[[], Any]) -> "Future[Any]":
        return self._start(action if self._ranks.rank == 0 else lambda: None)

    def _begin_pruning(self, save: _Save) -> None:
        save.part = _Part.PRUNE
        prunes, step = save.prunes, save.progress.step
        save.work = self._on_rank_zero(lambda: self._prune(step) if prunes else None)

    def _failure(self, progress: SavedProgress, error: OSError) -> SaveFailed:
        """Remove what was written, and say why."""
        reason = str(error) if isinstance(error, RankFailed) else f"rank 0: {error}"
        return SaveFailed(self._ranks.on_rank_zero(lambda: self._clean_up(f"step_{progress.step}", reason)))

    def _publish(self, progress: SavedProgress, shares: Iterable[Records]) -> None:
        """Turn the written folder into a checkpoint. Everything that needs disk space comes before the first rename."""
        final, partial = self._folders(progress)
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
    # Listed, and not asked for one by one: there is one for each rank.
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return [named[name] for name in sorted(named.keys() - known)]


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
