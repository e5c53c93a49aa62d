"""What all tasks have: a length, a seed, and examples that are functions of (seed, index)."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
from pydantic import Field

from megakernel.config.errors import Problem, UserError
from megakernel.config.section import Section

from .example import Example
from .filler import Filler

TRAINING, EVALUATION = 0, 1
"""Streams of examples of one seed: what is trained on is not measured."""

_TRIES = 8


class Task(Section):
    """Examples without end; each is a text, and the answers in it."""

    NAME: ClassVar[str]
    """What `--task` and `--source task:` call it."""

    length: int = Field(default=1024, ge=2)
    """Tokens of an example, the end of its document among them."""

    seed: int = Field(default=0, ge=0)
    """Seed of the examples; those of training and of evaluation differ with the same seed."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """Characters of the shortest example that these options allow."""

    @abstractmethod
    def write(self, rng: np.random.Generator, index: int, characters: int, filler: Filler) -> Example:
        """Example `index` in exactly so many characters, `shortest` or more."""

    def problems(self) -> Iterator[Problem]:
        """A length that the question and its answers do not fit."""
        if self.length <= self.shortest:
            reason = f"has no room for a {self.NAME} example of these options"
            yield Problem("length", self.length, reason, f"set {self.shortest + 1} or more")

    def example(self, stream: int, index: int, filler: Filler, count: Callable[[Example], int]) -> Example:
        """Example `index` of a stream, a function of (seed, stream, index) for one tokenizer.

        count: tokens of an example without the document's end. They fit `length`: with a token per character they
        fill it, with other tokenizers a few tries bring them near. Raises UserError where they do not fit.
        """
        room, characters = self.length - 1, self.length - 1
        fits = None
        for _ in range(_TRIES):
            rng = np.random.default_rng((self.seed, stream, index))
            found = self.write(rng, index, characters, filler)
            tokens = count(found)
            if tokens <= room:
                fits = found
            if 0.95 * room <= tokens <= room:
                break
            # A little less than in proportion: what is too long is no good, what is too short is.
            following = max(int(characters * 0.98 * room / tokens), self.shortest)
            if following == characters:
                break
            characters = following
        if fits is None:
            raise UserError(
                f"length={self.length} has no room for a {self.NAME} example in this tokenizer's tokens; "
                f"set length={2 * self.length} or more"
            )
        return fits
