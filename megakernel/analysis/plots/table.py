"""Rows of an analysis, their CSV file, and descriptions of the plots drawn from them."""

import csv
import io
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

Row = dict[str, int | float | str]
"""Column -> value; all rows of a table have the same columns in the same order."""


class Plot:
    """A plot of a table's rows, called `name`, or one for each value of the column `each`, named after it.

    kind: function in `drawing` that draws it; columns, options: its arguments.
    first: draw only the rows that have the first row's value in this column.
    """

    def __init__(
        self,
        kind: Literal["lines", "cells", "distributions"],
        name: str,
        *columns: str,
        each: str | None = None,
        first: str | None = None,
        **options: Any,
    ):
        self.kind, self.name, self.columns = kind, name, columns
        self.each, self.first, self.options = each, first, options


class Summary(NamedTuple):
    """Minimum, mean and maximum of a group of rows."""

    group: tuple[int | float | str, ...]
    minimum: float
    mean: float
    maximum: float


def to_csv(rows: Sequence[Row]) -> str:
    """A header and the rows; floats have six significant digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()})
    return text.getvalue()


def summaries(rows: Sequence[Row], value: str, by: Sequence[str]) -> list[Summary]:
    """A summary for each combination of the columns `by`, in the order of the rows; empty cells are skipped."""
    groups: dict[tuple[int | float | str, ...], list[float]] = {}
    for row in rows:
        if (number := row[value]) != "":
            groups.setdefault(tuple(row[key] for key in by), []).append(float(number))
    return [Summary(key, min(xs), statistics.fmean(xs), max(xs)) for key, xs in groups.items()]
