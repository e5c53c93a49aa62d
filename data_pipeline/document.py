"""What sources give and `prepare` writes."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Label: TypeAlias = int | str
"""A class as the source names it."""


class Document(NamedTuple):
    """One text; or a labelled example, of which two texts are compared where there are two."""

    texts: tuple[str, ...]
    label: Label | None = None

    answers: tuple[tuple[int, int], ...] | None = None
    """Of a task's example: first character and end of each answer in its one text."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table make a document."""

    texts: tuple[str, ...] = ("text",)
    label: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the label last."""
        return (*self.texts, self.label) if self.label is not None else self.texts
