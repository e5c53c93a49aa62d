"""Word counting, after RULER's aggregation tasks."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from megakernel.config.errors import Problem

from . import symbols
from .filler import Filler
from .task import ExampleBuilder, SyntheticTask

_WORD_CHARACTERS = symbols.WORD + 1
"""Characters of a word and its space."""


class _Words(SyntheticTask):
    """A shuffled list of words; the question asks for the most frequent ones."""

    length: int = Field(default=4096, ge=2, le=1_000_000_000)
    """Tokens of an example, including end-of-document."""

    asked: int = Field(default=3, ge=1, le=100)
    """Words that are asked for."""

    _INTRO: ClassVar[str] = "Some words of this list stand in it more often than others.\n"
    _QUESTION: ClassVar[str]

    def problems(self) -> Iterator[Problem]:
        """A length below the number of words in the shortest list."""
        yield from super().problems()
        if self.length < self._min_words:
            reason = f"is less than the {self._min_words:,} words of the shortest list"
            yield Problem("length", self.length, reason, "set a larger length, or ask for fewer words")

    @property
    @abstractmethod
    def _min_words(self) -> int:
        """Length of the shortest list, in words."""

    @abstractmethod
    def _counts(self, num_words: int) -> np.ndarray:
        """The count of each word in a list of `num_words` words; the asked words come first."""

    def _answer_order(self, words: list[str]) -> list[str]:
        """The asked words, most frequent first, in the order of the answer."""
        return words

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        more, rest = divmod(spare, _WORD_CHARACTERS)
        counts = self._counts(self._min_words + more)
        words = symbols.words(rng, len(counts))
        order = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        builder.write(self._INTRO)
        builder.write("".join(f" {words[at]}" for at in order) + "." * rest)
        builder.write(self._QUESTION.format(self.asked))
        for word in self._answer_order(words[: self.asked]):
            builder.answer(f" {word}")


class CommonWords(_Words):
    """A few words occur often in the list, all others rarely (RULER's common words)."""

    NAME: ClassVar[str] = "common_words"

    common_times: int = Field(default=30, ge=2)
    """Occurrences of each asked word in the list."""

    rare_times: int = Field(default=3, ge=1)
    """Occurrences of each other word."""

    _QUESTION: ClassVar[str] = "\nThe {} most frequent words, in alphabetical order, are"

    @property
    def _min_words(self) -> int:
        return self.asked * self.common_times + self.rare_times

    def _counts(self, num_words: int) -> np.ndarray:
        full, rest = divmod(num_words - self.asked * self.common_times, self.rare_times)
        rare = [self.rare_times] * full + [rest] * bool(rest)
        return np.array([self.common_times] * self.asked + rare)

    def _answer_order(self, words: list[str]) -> list[str]:
        return sorted(words)


class FrequentWords(_Words):
    """The frequency of word k is proportional to 1 / k ** alpha (RULER's frequent words)."""

    NAME: ClassVar[str] = "frequent_words"

    alpha: float = Field(default=2.0, ge=1, le=4)
    """Exponent of the Zipf distribution of words."""

    _QUESTION: ClassVar[str] = "\nThe {} most frequent words, the most frequent first, are"

    @property
    def _min_words(self) -> int:
        num_words = 16
        while not self._is_unambiguous(num_words):
            num_words *= 2
        return num_words

    def _is_unambiguous(self, num_words: int) -> bool:
        """Whether the asked words and the next one differ in frequency, so that the answer is unique."""
        leading = self._counts(num_words)[: self.asked + 1]
        return len(leading) > self.asked and bool((np.diff(leading) < 0).all())

    def _counts(self, num_words: int) -> np.ndarray:
        shares = np.arange(1, min(num_words, 10_000) + 1) ** -self.alpha
        counts = (num_words * shares / shares.sum()).astype(np.int64)
        counts[0] += num_words - counts.sum()
        return counts[counts > 0]
