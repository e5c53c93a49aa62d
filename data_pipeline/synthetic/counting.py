"""Words that have to be counted, after RULER's aggregation tasks."""

from abc import abstractmethod
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from . import symbols
from .filler import Filler
from .task import SyntheticTask, Writing

_SLOT = symbols.WORD + 1
"""Characters of a word and its space."""


class _Words(SyntheticTask):
    """A shuffled list of words, of which those that stand most often are asked for."""

    length: int = Field(default=4096, ge=2, le=1_000_000_000)
    """Tokens of an example, the end of its document among them."""

    asked: int = Field(default=3, ge=1, le=100)
    """Words that are asked for."""

    _INTRO: ClassVar[str] = "Some words of this list stand in it more often than others.\n"
    _QUESTION: ClassVar[str]

    @property
    @abstractmethod
    def _fewest(self) -> int:
        """Places of the shortest list."""

    @abstractmethod
    def _counts(self, places: int) -> np.ndarray:
        """How often each word stands in a list of so many places, those that are asked for first."""

    def _in_order(self, words: list[str]) -> list[str]:
        """The words in the order in which they are to be named, of those that are asked for, most frequent first."""
        return words

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        more, rest = divmod(spare, _SLOT)
        counts = self._counts(self._fewest + more)
        words = symbols.words(rng, len(counts))
        order = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        writing.write(self._INTRO)
        writing.write("".join(f" {words[at]}" for at in order) + "." * rest)
        writing.write(self._QUESTION.format(self.asked))
        for word in self._in_order(words[: self.asked]):
            writing.answer(f" {word}")


class CommonWords(_Words):
    """A few words stand often in the list, all others seldom (RULER's common words)."""

    NAME: ClassVar[str] = "common_words"

    common_times: int = Field(default=30, ge=2)
    """How often each word that is asked for stands in the list."""

    rare_times: int = Field(default=3, ge=1)
    """How often each other word does."""

    _QUESTION: ClassVar[str] = "\nThe {} most frequent words, in alphabetical order, are"

    @property
    def _fewest(self) -> int:
        return self.asked * self.common_times + self.rare_times

    def _counts(self, places: int) -> np.ndarray:
        whole, rest = divmod(places - self.asked * self.common_times, self.rare_times)
        rare = [self.rare_times] * whole + [rest] * bool(rest)
        return np.array([self.common_times] * self.asked + rare)

    def _in_order(self, words: list[str]) -> list[str]:
        return sorted(words)


class FrequentWords(_Words):
    """Word k stands in the list in proportion to 1 / k ** alpha (RULER's frequent words)."""

    NAME: ClassVar[str] = "frequent_words"

    alpha: float = Field(default=2.0, ge=1, le=4)
    """How fast words become rare."""

    _QUESTION: ClassVar[str] = "\nThe {} most frequent words, the most frequent first, are"

    @property
    def _fewest(self) -> int:
        places = 16
        while not self._ranks(places):
            places *= 2
        return places

    def _ranks(self, places: int) -> bool:
        """Whether no two words that could be asked for are equally frequent."""
        leading = self._counts(places)[: self.asked + 1]
        return len(leading) > self.asked and bool((np.diff(leading) < 0).all())

    def _counts(self, places: int) -> np.ndarray:
        shares = np.arange(1, min(places, 10_000) + 1) ** -self.alpha
        counts = (places * shares / shares.sum()).astype(np.int64)
        counts[0] += places - counts.sum()
        return counts[counts > 0]
