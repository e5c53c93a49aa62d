"""Folders that appear complete or not at all, and what a killed process has left of one."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from megakernel.config.errors import UserError

_PROGRESS = "progress.json"
_LOCK = "lock"


def target_of(out: Path, option: str = "") -> Path:
    """The folder that replaces a link's target, not the link. UserError, with the option, if it leads nowhere."""
    if out.is_symlink() and not out.exists():
        raise UserError(
            f"{option}{out} is a link to {os.readlink(out)}, which does not exist; make it, or name a folder"
        )
    return out.resolve()


@contextmanager
def atomic_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling folder that is renamed to `out` at the end, or deleted on failure.

    Raises UserError if another process has made `out` meanwhile, unless `overwrite`.
    """
    out = target_of(out)
    folder = _new_sibling(out, "partial")
    folder.mkdir(parents=True)
    try:
        yield folder
        _put_in_place(folder, out, overwrite)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class PartialFolder:
    """A folder in the making, which keeps its progress if the process ends."""

    path: Path

    identity: Mapping[str, Any] | None
    """What is made, as JSON values; another process goes on only if its own is equal. None: none ever does."""

    saved: Mapping[str, Any] | None = None
    """The progress of the process that made the first part."""

    def save(self, progress: Mapping[str, Any]) -> None:
        """Record what is finished; its files are written already."""
        temporary = self.path / f".{_PROGRESS}"
        temporary.write_text(json.dumps({"identity": self.identity, **progress}), encoding="utf-8")
        temporary.rename(self.path / _PROGRESS)

    @property
    def has_progress(self) -> bool:
        """Whether there is something to go on from."""
        return (self.path / _PROGRESS).is_file()


@contextmanager
def resumable_folder(
    out: Path, identity: Mapping[str, Any] | None, *, overwrite: bool, console: Console
) -> Iterator[PartialFolder]:
    """As `atomic_folder`, but the folder is kept on failure if it has progress, and a later process goes on from it.

    Says on the console which folders of other or killed processes there are. A lock tells that a process is running.
    """
    out = target_of(out)
    identity = json.loads(json.dumps(identity))
    partial, lock = _left(out, identity, console)
    if partial is None:
        partial = PartialFolder(_new_sibling(out, "partial"), identity)
        partial.path.mkdir(parents=True)
        lock = _lock(partial.path, os.O_CREAT)
    is_kept = False
    try:
        yield partial
        _put_in_place(partial.path, out, overwrite)
        for name in (_PROGRESS, _LOCK):
            (out / name).unlink(missing_ok=True)
    except BaseException as error:
        is_kept = partial.has_progress and not isinstance(error, _MadeMeanwhile)
        raise
    finally:
        if is_kept:
            console.print(
                f"{partial.path} keeps the files that are finished; the same command goes on from there",
                soft_wrap=True,
            )
        else:
            shutil.rmtree(partial.path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


class _MadeMeanwhile(UserError):
    """Another process has made the folder."""


def _new_sibling(out: Path, kind: str) -> Path:
    # Not a process id: processes of several machines or containers may write here.
    return out.with_name(f".{out.name}.{kind}-{uuid4().hex[:8]}")


def _put_in_place(folder: Path, out: Path, overwrite: bool) -> None:
    replaced = _new_sibling(out, "replaced")
    try:
        if overwrite and out.exists():
            out.rename(replaced)
        try:
            folder.rename(out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise _MadeMeanwhile(
                f"{out} was made by another process meanwhile; name another folder"
            ) from None
    finally:
        if replaced.exists() and not out.exists():  # it ends between the two renames
            replaced.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)


def _lock(folder: Path, flags: int = 0) -> int | None:
    """The descriptor of a folder's lock; None if another process holds it, or there is none."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | flags, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or the file system has no locks
        os.close(descriptor)
        return None
    return descriptor


def _left(
    out: Path, identity: Mapping[str, Any] | None, console: Console
) -> tuple[PartialFolder | None, int | None]:
    """A folder that a killed process of the same identity has left, locked; others, possibly large, are reported."""
    for folder in sorted(out.parent.glob(f".{escape(out.name)}.partial-*")):
        lock, saved = _lock(folder), None
        with suppress(OSError, ValueError):
            saved = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
        if lock is not None and saved is not None and saved["identity"] == identity is not None:
            return PartialFolder(folder, identity, saved), lock
        message = f"{folder} belongs to another `megakernel prepare`; delete it if none is running"
        if lock is not None and saved is not None:
            message += (
                f". It was stopped, and had {_difference(saved['identity'], identity)}: this one starts anew"
            )
        console.print(message, soft_wrap=True)
        if lock is not None:
            os.close(lock)
    return None, None


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any] | None) -> str:
    """The first value in which two identities differ."""
    for key, value in theirs.items():
        own = (ours or {}).get(key)
        if own != value:
            if isinstance(value, Mapping) and isinstance(own, Mapping):
                return _difference(value, own)
            return (
                f"other {key}"
                if isinstance(value, list | Mapping) or own is None
                else f"{key}={value!r}, not {own!r}"
            )
    return "other options"
