"""Reads the CSV tables that an analysis writes."""

import csv
import io


def from_csv(text):
    """The rows of `megakernel.analysis.plots.table.to_csv`: numbers are parsed."""
    return [{key: _value(x) for key, x in row.items()} for row in csv.DictReader(io.StringIO(text))]


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
