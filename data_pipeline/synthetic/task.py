"""The base of all tasks: a length, a seed, and examples that are functions of (seed, index)."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from megakernel.config.errors import UserError
from megakernel.config.section import Section

from .filler import Filler


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

    depth: float | None = None
    """As of `Example`."""

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

    def example(self) -> Example:
        """The finished example."""
        return Example("".join(self._parts), tuple(self._answers), self.depth)


TRAINING, EVALUATION = 0, 1
"""Streams of examples of one seed: what is trained on is not measured."""

_TRIES = 8

_CHARACTERS_PER_TOKEN = 4
"""Assumed for texts that a tokenizer is trained on: long enough to hold all parts of an example."""

_MOST_CHARACTERS = 16
"""Of a token: a tokenizer of words, which takes any run of letters for one, never fills an example without spaces."""


class SyntheticTask(Section):
    """Examples without end; each is a text, and the answers in it."""

    NAME: ClassVar[str]
    """Its name for `--task` and `--source task:`."""

    length: int = Field(default=1024, ge=2, le=1_000_000_000)
    """Tokens of an example, the end of its document among them."""

    seed: int = Field(default=0, ge=0)
    """Seed of the examples; those of training and of evaluation differ with the same seed."""

    @abstractmethod
    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        """Write example `index`, exactly `spare` characters longer than the shortest that these options allow."""

    def example(
        self, stream: int, index: int, filler: Filler, count: Callable[[Example], int] | None
    ) -> Example:
        """Example `index` of a stream, a function of (seed, stream, index) for one tokenizer.

        count: tokens of an example without the document's end. They fit `length`: with a token per character they
        fill it, with other tokenizers a few tries bring them near. None where no tokenizer is known yet, because it
        is trained on the example: a few characters are a token then. Raises UserError where they do not fit.
        """

        def write(spare: int) -> Example:
            writing = Writing()
            self._write(writing, np.random.default_rng((self.seed, stream, index)), index, spare, filler)
            return writing.example()

        shortest = len(write(0).text)
        room = self.length - 1
        if count is None:
            return write(max(_CHARACTERS_PER_TOKEN * room - shortest, 0))
        characters = max(room, shortest)
        fits = None
        for _ in range(_TRIES):
            found = write(characters - shortest)
            tokens = count(found)
            if tokens <= room:
                fits = found
            if 0.95 * room <= tokens <= room:
                break
            # A little less than in proportion: what is too long is no good, what is too short is.
            following = int(characters * 0.98 * room / tokens)
            following = max(min(following, _MOST_CHARACTERS * room), shortest)
            if following == characters:
                break
            characters = following
        if fits is None:
            raise UserError(
                f"{self.NAME}:length={self.length} has no room for an example of these options; "
                f"set length={tokens + 1} or more"
            )
        return fits
