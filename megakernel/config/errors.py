"""Errors that a user can mend: one line each, with the key, its value, the reason and the remedy."""

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

MISSING = object()
"""The value of a key that is not there."""


class UserError(ValueError):
    """Something the user can change: the command line prints its text alone and ends with status 2."""


class InUse(UserError):
    """What was asked for is sound, but another process is at it: the same command works once that one has ended."""


class RunFailed(RuntimeError):
    """A failure of a sound run: the command line prints its text alone and ends with status 1."""


class NotFinite(RunFailed):
    """Losses or gradients that are no numbers ended the run."""


@dataclass(frozen=True)
class Problem:
    """One key that has to change."""

    key: str
    """Dotted key such as `training.steps`, or the file and line where no key can be named."""

    value: Any
    """What the key holds, or MISSING."""

    reason: str
    """Why that does not work; reads on from the key and its value."""

    remedy: str
    """What to write instead."""

    def under(self, prefix: str) -> "Problem":
        """The same problem with its key counted from further out."""
        return replace(self, key=".".join(part for part in (prefix, self.key) if part))

    def __str__(self) -> str:
        named = [
            part for part in (self.key, "" if self.value is MISSING else _on_one_line(self.value)) if part
        ]
        return f"{'='.join(named)} {self.reason}; {self.remedy}"


class ConfigError(UserError):
    """Every problem of a configuration, one line each."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[UserError], tuple[str]]:
        """To another process its text goes alone: the values of its problems may be of any kind."""
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
}
"""Refusals of a file system that its user can change."""


@contextmanager
def written_to(key: str, place: object) -> Iterator[None]:
    """Around what goes where a key or option says: UserError, with it, for what the file system refuses."""
    try:
        yield
    except Exception as error:
        # Rust's libraries have exceptions of their own; a folder cannot be made where there is none above it (/proc).
        in_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = int(in_rust[1]) if in_rust else error.errno if isinstance(error, OSError) else None
        if number not in {*REFUSED_BY_DISK, errno.ENOENT}:
            raise
        named = f"{key} {place}" if key.startswith("-") else f"{key}={place}"
        raise UserError(
            f"{named} cannot be written ({error}); make it writable, free space or choose another {key}"
        ) from None


def first_line(error: Exception) -> str:
    """The first line of an error, or its type where it has no text."""
    return next(filter(None, str(error).splitlines()), type(error).__name__)


def nearest_first(word: str, known: Iterable[str], most: int | None = None) -> str:
    """The known words as a list for a remedy, those most like `word` first, and `most` of them at most."""
    likeness = {item: difflib.SequenceMatcher(None, word, item).ratio() for item in known}
    ordered = sorted(likeness, key=lambda item: (-likeness[item], item))
    left = len(ordered[most:]) if most is not None else 0
    return ", ".join(ordered[:most]) + (f" ... ({left} more)" if left else "")


def nearest_multiples(value: int, unit: int) -> str:
    """`96 or 128`: the positive multiples of `unit` on both sides of `value`, for a remedy."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _on_one_line(value: Any) -> str:
    text = str(value) if isinstance(value, (str, PurePath)) and value else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."
