"""What an analysis has written as CSV, read again."""

import csv
import io


def from_csv(text):
    """The rows of `megakernel.analysis.plots.table.to_csv`: what reads as a number is one."""
    return [{key: _value(x) for key, x in row.items()} for row in csv.DictReader(io.StringIO(text))]


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
