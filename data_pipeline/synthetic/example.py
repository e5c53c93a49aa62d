"""A text with answers in it, written piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """One text of a task, its question and its answers at the end or in between."""

    text: str
    """ASCII, so that a tokenizer of bytes has a token for each character."""

    answers: tuple[tuple[int, int], ...]
    """First character and end of each answer, in order. One that follows a space begins with it."""

    depth: float | None = None
    """Where in the text lies what is asked for, from 0 at its start to 1 at its end; None: in no one place."""


class Writing:
    """An example while it is written."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._answers: list[tuple[int, int]] = []

    def write(self, text: str) -> None:
        """Append what is read."""
        self._parts.append(text)
        self._length += len(text)

    def answer(self, text: str) -> None:
        """Append what is to be predicted."""
        self._answers.append((self._length, self._length + len(text)))
        self.write(text)

    def example(self, depth: float | None = None) -> Example:
        """What has been written."""
        return Example("".join(self._parts), tuple(self._answers), depth)
