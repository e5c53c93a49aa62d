"""What an evaluation shows: one table for the terminal and for TensorBoard."""

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of text, and what is to be said above and below them."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    total: tuple[str, ...] | None = None
    """A last row over all others."""

    below: tuple[str, ...] = ()
    """Lines."""

    def markdown(self) -> str:
        """The same for TensorBoard's text page."""
        rows = [*self.rows, *([self.total] if self.total else [])]
        lines = [" | ".join(row) for row in [self.columns, ("---",) * len(self.columns), *rows]]
        return "\n\n".join([self.title, "\n".join(f"| {line} |" for line in lines), *self.below])


def number(value: float | None, digits: int = 4) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:.{digits}f}"
