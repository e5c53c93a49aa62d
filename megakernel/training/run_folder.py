"""The run folder runs/NAME: its files, its lock, and the checks before a start uses it."""

import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from data_pipeline import tokenizers
from megakernel.checkpoint.trained_run import tokenizer_folder
from megakernel.config import (
    NOT_FINITE,
    UNPROVEN,
    Config,
    Difference,
    InUse,
    UserError,
    check_same_run,
    from_yaml,
    to_yaml,
)
from megakernel.config.errors import report_write_errors
from megakernel.config.resume import saved_steps
from megakernel.parallel.ranks import Ranks

from . import events
from .environment import environment_text

WAIT_SECONDS = 10.0
"""Seconds that a start waits for a previous one in its folder, which may still be ending."""

LEASE_SECONDS = 120.0
"""The same for one on another host: file servers keep the locks of a lost host for a while."""

_LOCK_DENIED = (errno.EACCES, errno.EAGAIN)
_POLL_SECONDS = 0.1


class RunLock:
    """A lock on a folder, held while this object exists; the end of the process, however it ends, releases it too.

    It is a POSIX lock: forked processes do not inherit it, network file systems support it, and a process should have
    one object per folder, because closing any of them releases it. File systems without locks have none.
    """

    def __init__(
        self,
        folder: Path,
        wait_seconds: float = WAIT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        *,
        name: str = "lock",
        activity: str = "writes into",
    ):
        """folder: run folder, whose file `name` names the holder. activity: what the holder does, for the error.

        Raises InUse if another process holds it for longer than `wait_seconds`, or `lease_seconds` on another host.
        """
        self._path = folder / name
        self._file = self._path.open("a+", encoding="utf-8")
        started = time.monotonic()
        while not self._try_lock():
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            is_local = holder.endswith(f" on {socket.gethostname()}")
            if time.monotonic() - started > (wait_seconds if is_local else lease_seconds):
                self._file.close()
                raise InUse(
                    f"run.name={folder.name}: {holder} {activity} {folder}; wait until it ends, stop it, or choose "
                    "another run.name"
                )
            time.sleep(_POLL_SECONDS)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @property
    def is_effective(self) -> bool:
        """Whether this lock is effective: false if the previous holder has removed the file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Release the lock and remove its file."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _LOCK_DENIED
        return True


def write_atomically(path: Path, text: str) -> None:
    """Write a text file atomically and sync it to disk. Raises OSError, which names the file."""
    staged = path.with_name(path.name + ".partial")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(path)
    except OSError as error:
        with suppress(OSError):
            staged.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


EVENT_FILES = "events.out.tfevents.*"
"""TensorBoard's files."""

_EARLIER_EVENTS = "tensorboard"
"""Folder in a run's folder where earlier versions wrote them."""


def events_folder(run: Path, part: str = "") -> Path:
    """Where TensorBoard's files of a run are; part: `evaluation` or `analysis`, which it lists as runs beside it.

    The run's own folder, so that TensorBoard lists it by name; RUN/tensorboard if an earlier version began the run.
    """
    earlier = run / _EARLIER_EVENTS
    return (earlier if earlier.is_dir() else run) / part


def stop_file(run: Path) -> Path:
    """File that makes the run save and stop once it exists; anyone may create it."""
    return run / "STOP"


def allow_new_learning_rates(run: Path) -> None:
    """Record that steps were not finite, so that the next start may change learning rates."""
    file = run / "config.yaml"
    with suppress(OSError):
        text = file.read_text(encoding="utf-8")
        if not text.startswith((UNPROVEN, NOT_FINITE)):
            write_atomically(file, NOT_FINITE + text)


_APPENDED = ("environment.txt", "events.jsonl", "lock", "metrics.jsonl", "logs/rank_*.log")
"""Files of a run folder that starts append to."""


def refuse_links(run: Path) -> None:
    """Raise UserError if a file that a run appends to is a link: what it leads to may be anything else's.

    Links of folders, such as checkpoints on another disk, are fine.
    """
    for file in (file for pattern in _APPENDED for file in run.glob(pattern)):
        if file.is_symlink():
            raise UserError(
                f"run.name={run.name}: {file} is a link to {os.readlink(file)}, and a run writes only files of its "
                "own; remove the link, or choose another run.name"
            )


class RunFolder:
    """Paths in the folder of one run. Rank 0 writes the files; all ranks write checkpoints, logs and profiles."""

    def __init__(self, config: Config, ranks: Ranks | None = None, allowed: Sequence[str] = ()):
        """allowed: keys that may change at this start, as `check_same_run` takes them."""
        self._config = config
        self._ranks = ranks or Ranks()
        self._allowed = allowed
        self.recorded: Config | None = None
        """On rank 0, after `open`: the configuration of the start before, if a step of it has succeeded."""
        self.path = config.run.folder
        self.config_file = self.path / "config.yaml"
        self.environment_file = self.path / "environment.txt"
        self.metrics_file = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = tokenizer_folder(self.path)
        self._lock: RunLock | None = None
        self._fixed = False

    @property
    def events(self) -> Path:
        """`events_folder` of the run."""
        return events_folder(self.path)

    def open(self, devices: Sequence[str]) -> list[Difference]:
        """Create and lock the folder, or reopen that of the same run; called on every rank before anything is written.

        devices: names of this host's devices, for environment.txt.
        Returns the permitted changes since the last start, with which config.yaml is updated.
        Raises UserError, alike on all ranks, for a folder of another configuration, one that another start uses, or
        one that cannot be written.
        """
        return self._ranks.on_rank_zero(lambda: self._open(devices))

    def fix_configuration(self) -> None:
        """Make config.yaml final after the first successful step or save, so that restarts are checked. On rank 0."""
        if not self._fixed:
            with suppress(OSError):  # retried after the next step
                write_atomically(self.config_file, to_yaml(self._config))
                self._fixed = True

    def keep_tokenizer(self, source: Path, digest: str) -> None:
        """Copy the corpus's tokenizer into the run folder, so that the run can be used without the corpus.

        source: the tokenizer's folder. digest: its `Tokenizer.hash`. Called on every rank, after `open`.
        Raises UserError, alike on all ranks, if the run began with another tokenizer.
        """
        self._ranks.on_rank_zero(lambda: self._keep_tokenizer(source, digest))

    def _keep_tokenizer(self, source: Path, digest: str) -> None:
        if not self.tokenizer.exists():
            staged = self.tokenizer.with_name(self.tokenizer.name + ".partial")
            shutil.rmtree(staged, ignore_errors=True)
            with report_write_errors("run.root", self._config.run.root):
                shutil.copytree(source, staged)
                staged.rename(self.tokenizer)
            return
        kept = tokenizers.load(self.tokenizer)
        if kept.hash != digest:
            raise UserError(
                f"data.train holds a corpus of another tokenizer ({source}) than the run began with; prepare it with "
                f"--tokenizer {self.tokenizer}, or choose another run.name"
            )
        if kept.add_bos != tokenizers.load(source).add_bos:
            flag = "--add-bos" if kept.add_bos else "--no-add-bos"
            raise UserError(
                f"data.train: documents of {source.parent} {'do not ' if kept.add_bos else ''}begin with BOS, unlike "
                f"those that the run began with; prepare them with {flag}, or choose another run.name"
            )

    def _open(self, devices: Sequence[str]) -> list[Difference]:
        with report_write_errors("run.root", self._config.run.root):
            self._changes()  # raises before anything is written
            self.path.mkdir(parents=True, exist_ok=True)
            refuse_links(self.path)
            self._lock = RunLock(self.path)
            changes = self._changes()  # again: the previous holder of the lock may have changed config.yaml
            text = self.config_file.read_text(encoding="utf-8") if self.config_file.exists() else UNPROVEN
            head = next((head for head in (UNPROVEN, NOT_FINITE) if text.startswith(head)), "")
            if head == UNPROVEN:
                for folder in (self.tokenizer, self.path / _EARLIER_EVENTS):
                    shutil.rmtree(folder, ignore_errors=True)
                for file in self.path.glob(EVENT_FILES):
                    file.unlink()
            else:
                self.recorded = from_yaml(text, str(self.config_file))
                self._record_changes(changes)
            write_atomically(self.config_file, head + to_yaml(self._config))
            self._fixed = not head
            for folder in (self.logs, self.checkpoints):
                folder.mkdir(exist_ok=True)
            # A command line or a working directory need not be UTF-8.
            with self.environment_file.open("a", encoding="utf-8", errors="backslashreplace") as history:
                history.write(environment_text(devices, self._ranks.size))
                for change in changes:
                    history.write(f"changed: {change.key} from {change.recorded!r} to {change.wanted!r}\n")
        return changes

    def _record_changes(self, changes: Sequence[Difference]) -> None:
        """Append a line to events.jsonl for each change of how the run learns from its newest checkpoint on."""
        for change in changes:
            if change.is_of_training:
                facts = {"key": change.key, "recorded": change.recorded, "wanted": change.wanted}
                events.record(self.path, "changed", **facts, step=saved_steps(self.path))

    def _changes(self) -> list[Difference]:
        try:
            recorded = self.config_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._refuse_unknown_output()
            return []
        return check_same_run(recorded, self._config, self.path, self._allowed)

    def _refuse_unknown_output(self) -> None:
        """Refuse training output without config.yaml: starts write that first, so its configuration is unknown."""
        if self.metrics_file.exists() or self.checkpoints.exists():
            raise UserError(
                f"run.name={self._config.run.name}: {self.path} holds the output of a run but no "
                "config.yaml; restore it, or choose another run.name"
            )
