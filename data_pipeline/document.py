"""What sources give and `prepare` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, NamedTuple, TypeAlias

Label: TypeAlias = int | str
"""A class as the source names it."""


class Document(NamedTuple):
    """One text; or a labelled example, of which two texts are compared where there are two."""

    texts: tuple[str, ...]

    label: Label | float | None = None
    """A class, or the number that a regression predicts."""

    split: str | None = None
    """The split that the source puts it into; None leaves it to the hash of its content."""

    joined: bool = False
    """Two texts are one sequence of tokens, with an end behind each; otherwise a sequence each."""

    answers: tuple[tuple[int, int], ...] | None = None
    """Of a task's example: first character and end of each answer in its one text."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    """Of a conversation: what its template renders. Its one text is what they say, without roles."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table make a document."""

    texts: tuple[str, ...] = ("text",)
    label: str | None = None

    numbers: bool = False
    """Labels are numbers to predict, not classes."""

    chat: bool = False
    """The one text is a conversation, a list of messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, the label last."""
        return (*self.texts, self.label) if self.label is not None else self.texts

    @property
    def label_form(self) -> tuple[UnionType | type, str]:
        """The types that a label may have, and their name in an error."""
        return (float, "a number") if self.numbers else (int | str, "a class")


TEXT = Columns()
"""Column `text` alone."""
