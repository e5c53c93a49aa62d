"""A document, which sources yield and `prepare` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Label: TypeAlias = int | str
"""A class as the source names it."""


class Document(NamedTuple):
    """One text; a text and its translation; or a labeled example of one text, or of two that are compared."""

    texts: tuple[str, ...]

    label: Label | float | None = None
    """A class, or the number that a regression predicts."""

    split: str | None = None
    """The split that the source assigns; None: the hash of the content decides."""

    joined: bool = False
    """Whether two texts form one token sequence, each ended by end-of-document; otherwise they form one each."""

    answers: tuple[tuple[int, int], ...] | None = None
    """Of a synthetic task's example: the character range of each answer in its one text."""

    messages: tuple[Mapping[str, Any], ...] | None = None
    """Of a conversation: the messages for the template. Its one text is their contents without roles."""

    place: tuple[str, int] | None = None
    """Of a conversation: its file and row, to name it if the template rejects it."""

    @property
    def is_pair(self) -> bool:
        """Whether it is a text and its translation."""
        return len(self.texts) == 2 and self.label is None and not self.joined

    @property
    def content(self) -> bytes:
        """The UTF-8 bytes of its texts, by which it is split: of a pair the source, whatever its translations."""
        return "".join(self.texts[:1] if self.is_pair else self.texts).encode()


@dataclass(frozen=True)
class Columns:
    """The columns of a table that make a document."""

    texts: tuple[str, ...] = ("text",)
    label: str | None = None

    numbers: bool = False
    """Whether labels are numbers to predict, not classes."""

    chat: bool = False
    """Whether the one text is a conversation, a list of messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """All columns, the label last."""
        return (*self.texts, self.label) if self.label is not None else self.texts


DOCUMENTS_PER_PAIR = 2
"""A text and its translation, adjacent in the token files."""

TEXT = Columns()
"""Only column `text`."""
