"""What of a source was read and what was not: counts, the limit of bad rows, and the table that `prepare` ends with."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, Field

from data_pipeline.files import CATALOG, HIDDEN, TEXT_FILE, File
from data_pipeline.rows import NOT_UNICODE
from megakernel.config.errors import UserError

MAX_BAD_ROWS = 0.001
"""Default of --max-bad-rows."""

FEW = 10
"""Bad rows that the default allows in any source with as many good ones: of few rows, one is a large share."""

_HOPELESS = 1000
"""Bad rows from which on the limit is checked at each, not only at the end of the source."""

_NAMED = 5
"""Bad rows of a file that are named one by one."""


class BadRows(BaseModel):
    """Bad rows of one file."""

    count: int = 0
    first: list[tuple[int, str]] = Field(default_factory=list)
    """Number and reason of the first ones."""


class Counts(BaseModel):
    """What was read of a source so far."""

    files: int = 0
    """Files that were read to their end."""

    documents: int = 0

    skipped: Counter[str] = Field(default_factory=Counter)
    """Documents and rows that were skipped, by reason."""

    bad: dict[str, BadRows] = Field(default_factory=dict)
    """File -> its bad rows, which `skipped` counts, too."""

    bad_rows: int = 0

    special_tokens: Counter[str] = Field(default_factory=Counter)
    """Special tokens that texts name, with `prepare --special-tokens parse`."""

    left_out: dict[str, str] = Field(default_factory=dict)
    """Text files that turned out to be unreadable -> why."""

    def add_bad(self, place: str, number: int, reason: str) -> None:
        """Count one bad row of a file."""
        self.skipped[reason if reason == NOT_UNICODE else "bad row"] += 1
        self.bad_rows += 1
        rows = self.bad.setdefault(place, BadRows())
        rows.count += 1
        if len(rows.first) < _NAMED:
            rows.first.append((number, reason))

    @property
    def rows(self) -> int:
        """Rows or documents that were read, bad ones included."""
        return self.documents + self.skipped.total()


def check_bad_rows(counts: Counts, share: float | None, *, at_end: bool) -> None:
    """UserError if more than `share` of the rows are bad; None: MAX_BAD_ROWS, or FEW.

    Before the end a few bad rows say nothing about the share.
    """
    bad, rows = counts.bad_rows, counts.rows
    if not at_end and bad <= _HOPELESS:
        return
    allowed = rows * (MAX_BAD_ROWS if share is None else share)
    if share is None:
        allowed = max(allowed, min(FEW, rows - bad))
    if bad <= allowed:
        return
    place, first = next((place, rows.first[0]) for place, rows in counts.bad.items())
    raise UserError(
        f"--source {place} cannot be read: row {first[0]:,}: {first[1]}; {bad:,} of {rows:,} rows are bad, more than "
        f"--max-bad-rows {MAX_BAD_ROWS if share is None else share:g} allows; correct them, or allow more"
    )


def describe_bad_rows(counts: Counts) -> list[str]:
    """Lines that say how many rows were skipped, and which."""
    lines = []
    for place, rows in list(counts.bad.items())[:20]:
        named = ", ".join(f"row {number:,} ({reason.partition('; ')[0]})" for number, reason in rows.first)
        more = f" and {rows.count - len(rows.first):,} more" if rows.count > len(rows.first) else ""
        lines.append(f"{_shown(place)}: {named}{more}")
    if len(counts.bad) > len(lines):
        lines.append(f"bad rows of {len(counts.bad) - len(lines):,} more files")
    return lines


def describe_files(files: Sequence[File], left_out: dict[str, str]) -> list[str]:
    """Lines that say which files were read as rows or messages, which as texts, and which were left out and why."""
    groups: dict[tuple[int, str], list[str]] = {}
    for file in files:
        if (why := left_out.get(str(file.path))) is not None:
            file = file.left_out(why)
        if file.format is None:
            group = 2, f"left out: {file.what}"
        elif file.format == TEXT_FILE:
            group = 1, f"read as text{_details(file)}"
        else:
            rows = "messages" if file.format == CATALOG else "rows"
            group = 0, f"read as {rows} ({file.what})"
        groups.setdefault(group, []).append(str(file.path))
    common = os.path.commonpath([os.path.abspath(file.path.parent) for file in files]) if files else ""
    groups = {group: [os.path.relpath(name, common) for name in names] for group, names in groups.items()}
    width = max((len(f"{len(names):,}") for names in groups.values()), default=0)
    lines = []
    for (_, how), names in sorted(groups.items()):
        noun = "file " if len(names) == 1 else "files "
        if how == f"left out: {HIDDEN}":  # files and folders
            noun = ""
        lines.append(f"{len(names):>{width},} {noun}{how}: {_some(names)}")
    return lines


def count_left_out(files: Iterable[File], left_out: dict[str, str]) -> dict[str, int]:
    """Why files were left out -> how many."""
    reasons = (left_out.get(str(file.path)) or ("" if file.format else file.what) for file in files)
    return dict(Counter(filter(None, reasons)))


def _details(file: File) -> str:
    return "" if file.what == TEXT_FILE else f" ({file.what.removeprefix(f'{TEXT_FILE}, ')})"


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(_shown, names[:most])) + more


def _shown(name: str) -> str:
    """A name that changes nothing on a terminal."""
    return name if name.isprintable() else ascii(name)
