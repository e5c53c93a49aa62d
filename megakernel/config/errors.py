"""Errors that a user can fix: one line each, with the key, its value, the reason and the remedy."""

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

MISSING = object()
"""Value of a key that is absent."""


class UserError(ValueError):
    """An error that the user can fix: the command line prints only its text and exits with status 2."""


class InUse(UserError):
    """A valid request for something that another process is using; the same command works once that one has ended."""


class RunFailed(RuntimeError):
    """A failure of a valid run: the command line prints only its text and exits with status 1."""


class NotFinite(RunFailed):
    """Non-finite losses or gradients ended the run."""


class PreparationFailed(RunFailed):
    """What a run needs before its first step, such as an index of its data, could not be made ready."""


@dataclass(frozen=True)
class Problem:
    """One key that has to change."""

    key: str
    """Dotted key such as `training.steps`, or a file and line if there is no key."""

    value: Any
    """Value of the key, or MISSING."""

    reason: str
    """Why the value is invalid; continues the sentence that starts with key and value."""

    remedy: str
    """What to write instead."""

    def under(self, prefix: str) -> "Problem":
        """The same problem with `prefix.` before its key."""
        return replace(self, key=".".join(part for part in (prefix, self.key) if part))

    def __str__(self) -> str:
        named = [
            part for part in (self.key, "" if self.value is MISSING else _on_one_line(self.value)) if part
        ]
        return f"{'='.join(named)} {self.reason}; {self.remedy}"


class ConfigError(UserError):
    """All problems of a configuration, one line each."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[str]]:
        """Pickle only the text: values of problems may be unpicklable."""
        return UserError, (str(self),)


REFUSED_BY_DISK = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.ELOOP,
}
"""File-system errors that the user can fix."""


@contextmanager
def report_write_errors(key: str, place: object) -> Iterator[None]:
    """Turn file-system errors while writing to `place` into a UserError that names the key or option."""
    try:
        yield
    except Exception as error:
        # Rust libraries raise their own exceptions. ENOENT: a folder that cannot be created at all, as in /proc.
        in_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = int(in_rust[1]) if in_rust else error.errno if isinstance(error, OSError) else None
        if number not in {*REFUSED_BY_DISK, errno.ENOENT}:
            raise
        named = f"{key} {place}" if key.startswith("-") else f"{key}={place}"
        raise UserError(
            f"{named} cannot be written ({error}); make it writable, free space or choose another {key}"
        ) from None


def check_writable(key: str, file: Path) -> None:
    """Raise UserError if `file`, named by key or option, cannot be written, before the work whose result it is for."""
    with report_write_errors(key, file):
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()


def existing_parent(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists: where it can be written, and how much space there is."""
    return next(place for place in (path, *path.parents) if place.exists())


def first_line(error: Exception) -> str:
    """First line of an error's text, or its type if it has none."""
    return next(filter(None, str(error).splitlines()), type(error).__name__)


def nearest_first(word: str, known: Iterable[str], most: int | None = None) -> str:
    """The known words as a list for a remedy, most similar to `word` first, at most `most` of them."""
    likeness = {item: difflib.SequenceMatcher(None, word, item).ratio() for item in known}
    ordered = sorted(likeness, key=lambda item: (-likeness[item], item))
    left = len(ordered[most:]) if most is not None else 0
    return ", ".join(ordered[:most]) + (f" ... ({left} more)" if left else "")


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` around `value`, for a remedy: `96 or 128`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _on_one_line(value: Any) -> str:
    text = str(value) if isinstance(value, (str, PurePath)) and value else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
