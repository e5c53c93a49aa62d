"""Base of synthetic tasks: a length, a seed, and examples that are functions of (seed, index)."""

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
    """One text with questions, and its answers at the end or in between."""

    text: str
    """ASCII, so that the byte tokenizer has one token per character."""

    answers: tuple[tuple[int, int], ...]
    """Character range of each answer, in order; a preceding space belongs to the answer."""

    depth: float | None = None
    """Where the asked statement is hidden, from 0 (start of the text) to 1 (end); None: not in one place."""


class ExampleBuilder:
    """Builder of an example."""

    depth: float | None = None
    """See `Example.depth`."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._answers: list[tuple[int, int]] = []

    def write(self, text: str) -> None:
        """Append text that is not predicted."""
        self._parts.append(text)
        self._length += len(text)

    def answer(self, text: str) -> None:
        """Append an answer, which is to be predicted."""
        self._answers.append((self._length, self._length + len(text)))
        self.write(text)

    def example(self) -> Example:
        """The finished example."""
        return Example("".join(self._parts), tuple(self._answers), self.depth)


TRAINING, EVALUATION = 0, 1
"""Streams of one seed, so that evaluation examples differ from training examples."""

_ATTEMPTS = 8

_CHARACTERS_PER_TOKEN = 4
"""Assumed while a tokenizer is trained on the examples; large enough for all parts of an example to fit."""

_MAX_CHARACTERS_PER_TOKEN = 16
"""Cap on characters per token: the words tokenizer makes one token of any text without spaces, however long."""


class SyntheticTask(Section):
    """An endless stream of examples."""

    NAME: ClassVar[str]
    """Its name for `--task` and `--source task:`."""

    length: int = Field(default=1024, ge=2, le=1_000_000_000)
    """Tokens of an example, including end-of-document."""

    seed: int = Field(default=0, ge=0)
    """Seed of the examples; training and evaluation differ for the same seed."""

    @abstractmethod
    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        """Write example `index`, `spare` characters longer than the shortest possible with these options."""

    def example(
        self, stream: int, index: int, filler: Filler, count: Callable[[Example], int] | None
    ) -> Example:
        """Example `index` of a stream, a function of (seed, stream, index) for one tokenizer.

        count: counts an example's tokens without end-of-document. They fill `length` exactly with one token per
        character, and nearly with other tokenizers, by a few attempts. None while a tokenizer is trained on the
        examples: a token is then assumed to be _CHARACTERS_PER_TOKEN characters. Raises UserError if nothing fits.
        """

        def write(spare: int) -> Example:
            builder = ExampleBuilder()
            self._write(builder, np.random.default_rng((self.seed, stream, index)), index, spare, filler)
            return builder.example()

        shortest = len(write(0).text)
        room = self.length - 1
        if count is None:
            return write(max(_CHARACTERS_PER_TOKEN * room - shortest, 0))
        characters = max(room, shortest)
        fits = None
        for _ in range(_ATTEMPTS):
            example = write(characters - shortest)
            tokens = count(example)
            if tokens <= room:
                fits = example
            if 0.95 * room <= tokens <= room:
                break
            # Slightly less than proportional: too long is useless, too short is acceptable.
            following = int(characters * 0.98 * room / tokens)
            following = max(min(following, _MAX_CHARACTERS_PER_TOKEN * room), shortest)
            if following == characters:
                break
            characters = following
        if fits is None:
            raise UserError(
                f"{self.NAME}:length={self.length} has no room for an example of these options; "
                f"set length={tokens + 1} or more"
            )
        return fits
