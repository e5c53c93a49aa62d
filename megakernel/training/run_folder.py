"""runs/NAME: what a run leaves on disk, whether a start may go on in it, and that one start at a time writes there."""

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
    to_yaml,
)
from megakernel.config.errors import written_to
from megakernel.parallel.ranks import Ranks

from .environment import environment_text

WAIT_SECONDS = 10.0
"""How long a start waits for another one in its folder: one that was told to end may still be ending."""

LEASE_SECONDS = 120.0
"""The same where that is on another host: file servers keep the locks of a host that is gone for a while."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_POLL_SECONDS = 0.1


class RunLock:
    """Held by this process while this object lives, and no longer than the process does, however it ends.

    The lock is POSIX's: processes that this one forks do not hold it, network file systems pass it on, and a process
    should have one object of a folder, for the first that goes releases it. Where a file system has no locks there is
    none.
    """

    def __init__(
        self,
        folder: Path,
        wait_seconds: float = WAIT_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        *,
        name: str = "lock",
        held_to: str = "writes into",
    ):
        """folder: of the run; its file `name` says who holds the lock. held_to: what whoever holds it does there.

        Raises InUse where another process does for longer than `wait_seconds`, or `lease_seconds` on another host.
        """
        self._path = folder / name
        self._file = self._path.open("a+", encoding="utf-8")
        begun = time.monotonic()
        while not self._taken():
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            here = holder.endswith(f" on {socket.gethostname()}")
            if time.monotonic() - begun > (wait_seconds if here else lease_seconds):
                self._file.close()
                raise InUse(
                    f"run.name={folder.name}: {holder} {held_to} {folder}; wait until it ends, stop it, or choose "
                    "another run.name"
                )
            time.sleep(_POLL_SECONDS)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @property
    def is_of_its_file(self) -> bool:
        """Whether others would meet this lock: not where the one who held it before has removed the file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def release(self) -> None:
        """Leave the folder to others, without a trace."""
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _taken(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _TAKEN
        return True


def write_whole(path: Path, text: str) -> None:
    """Write a text file, or leave what was there; it is on the disk when this returns.

    Raises OSError, which names the file.
    """
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


def stop_file(run: Path) -> Path:
    """Made by anyone, it asks the run to save and stop."""
    return run / "STOP"


def free_learning_rates(run: Path) -> None:
    """Write down that steps were not finite, so that the next start may lower learning rates."""
    file = run / "config.yaml"
    with suppress(OSError):
        text = file.read_text(encoding="utf-8")
        if not text.startswith((UNPROVEN, NOT_FINITE)):
            write_whole(file, NOT_FINITE + text)


class RunFolder:
    """The places in the folder of one run. All ranks may name them; rank 0 writes, checkpoints apart."""

    def __init__(self, config: Config, ranks: Ranks | None = None):
        self._config = config
        self._ranks = ranks or Ranks()
        self.path = config.run.folder
        self.config_file = self.path / "config.yaml"
        self.environment_file = self.path / "environment.txt"
        self.metrics_file = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.tokenizer = tokenizer_folder(self.path)
        self._lock: RunLock | None = None
        self._fixed = False

    def open(self, devices: Sequence[str]) -> list[Difference]:
        """Make the folder, or go on in that of the same run; called on every rank before anything is written.

        From here this process alone writes into it.

        devices: names of this host's devices, for environment.txt.
        Returns the keys that differ from the last start and may; config.yaml is then brought up to date.
        Raises UserError, alike on all ranks, for the folder of another configuration, which stays as it is,
        for one that another start writes into, and for a folder that cannot be written.
        """
        return self._ranks.first(lambda: self._open(devices))

    def fix(self) -> None:
        """From here on, a step or a save behind it, the configuration is that of the run. Called on rank 0."""
        if not self._fixed:
            with suppress(OSError):  # the next step comes here again
                write_whole(self.config_file, to_yaml(self._config))
                self._fixed = True

    def keep_tokenizer(self, source: Path, digest: str) -> None:
        """Keep the corpus's tokenizer with the run, so that the run can be used without the corpus.

        source: the tokenizer's folder; digest: its `Tokenizer.hash`. Called on every rank, after `open`.
        Raises UserError, alike on all ranks, where the run began with another tokenizer.
        """
        self._ranks.first(lambda: self._keep_tokenizer(source, digest))

    def _keep_tokenizer(self, source: Path, digest: str) -> None:
        if not self.tokenizer.exists():
            staged = self.tokenizer.with_name(self.tokenizer.name + ".partial")
            shutil.rmtree(staged, ignore_errors=True)
            with written_to("run.root", self._config.run.root):
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
        with written_to("run.root", self._config.run.root):
            self._changes()  # a refusal leaves everything as it is
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path)
            changes = self._changes()  # whoever wrote here until now may have changed it
            text = self.config_file.read_text(encoding="utf-8") if self.config_file.exists() else UNPROVEN
            head = next((head for head in (UNPROVEN, NOT_FINITE) if text.startswith(head)), "")
            if head == UNPROVEN:
                for folder in (self.tokenizer, self.tensorboard):
                    shutil.rmtree(folder, ignore_errors=True)
            write_whole(self.config_file, head + to_yaml(self._config))
            self._fixed = not head
            for folder in (self.tensorboard, self.logs, self.checkpoints):
                folder.mkdir(exist_ok=True)
            with self.environment_file.open("a", encoding="utf-8") as history:
                history.write(environment_text(devices, self._ranks.size))
                for change in changes:
                    history.write(f"changed: {change.key} from {change.recorded!r} to {change.wanted!r}\n")
        return changes

    def _changes(self) -> list[Difference]:
        try:
            recorded = self.config_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            self._refuse_remains()
            return []
        return check_same_run(recorded, self._config, self.path)

    def _refuse_remains(self) -> None:
        """A start writes config.yaml first, so training output without it is of an unknown configuration."""
        if self.metrics_file.exists() or self.checkpoints.exists():
            raise UserError(
                f"run.name={self._config.run.name}: {self.path} holds the output of a run but no "
                "config.yaml; restore it, or choose another run.name"
            )
