"""Symbols that have to be found again: associative recall, copying, induction."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from megakernel.config.errors import Problem

from . import symbols
from .filler import Filler
from .haystack import depth_of
from .task import SyntheticTask, Writing


class Recall(SyntheticTask):
    """A short row of symbols."""

    length: int = Field(default=128, ge=2, le=1_000_000_000)
    """Tokens of an example, the end of its document among them."""


class Mqar(Recall):
    """Multi-query associative recall (Zoology, section 4): keys with values, then keys that ask for their values.

    Keys are small letters, values large ones, and digits fill what is left between the queries, whose gaps are
    drawn evenly (the paper draws them by a power law).
    """

    NAME: ClassVar[str] = "mqar"

    pairs: int = Field(default=8, ge=1)
    """Keys with their values."""

    queries: int | None = Field(default=None, ge=1)
    """Keys that are asked for, each once; null asks for all."""

    key_length: int = Field(default=1, ge=1, le=8)
    """Letters of a key; 26 ** key_length keys exist."""

    value_length: int = Field(default=1, ge=1)
    """Letters of a value."""

    spaced: bool = False
    """A space before each symbol, for tokenizers of words."""

    @property
    def asked(self) -> int:
        """Queries of an example."""
        return self.pairs if self.queries is None else self.queries

    def problems(self) -> Iterator[Problem]:
        """More keys than there are, and more queries than keys."""
        yield from super().problems()
        if self.pairs > len(symbols.LOWER) ** self.key_length:
            reason = (
                f"exceeds the {len(symbols.LOWER) ** self.key_length} keys of key_length={self.key_length}"
            )
            yield Problem("pairs", self.pairs, reason, f"set key_length={self.key_length + 1}")
        if self.asked > self.pairs:
            yield Problem("queries", self.queries, f"exceeds pairs={self.pairs}", f"set at most {self.pairs}")

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        space = " " * self.spaced
        keys = symbols.distinct(rng, symbols.LOWER, self.key_length, self.pairs)
        values = [symbols.text(rng, symbols.UPPER, self.value_length) for _ in keys]
        for key, value in zip(keys, values):
            writing.write(f"{space}{key}{space}{value}")
        noise = symbols.text(rng, symbols.DIGITS, spare)
        cuts = np.sort(rng.integers(spare + 1, size=self.asked)).tolist()
        for at, begun, end in zip(rng.permutation(self.pairs), [0, *cuts], cuts):
            writing.write(f"{noise[begun:end]}{space}{keys[at]}")
            writing.answer(f"{space}{values[at]}")
        writing.write(noise[cuts[-1] :])


class Copy(Recall):
    """Random letters, a bar, and the same letters again."""

    NAME: ClassVar[str] = "copy"

    alphabet: int = Field(default=26, ge=2, le=26)
    """Different letters."""

    answer_length: int = Field(default=8, ge=1)
    """Letters that are counted right or wrong together."""

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        count = 1 + spare // 2
        letters = symbols.text(rng, symbols.LOWER[: self.alphabet], count)
        # An even number of characters has one more bar, in front.
        writing.write("|" * (spare % 2) + letters + "|")
        for start in range(0, count, self.answer_length):
            writing.answer(letters[start : start + self.answer_length])


class Induction(Recall):
    """Random letters and, once, a star: what followed it has to follow it again (induction heads, as in H3)."""

    NAME: ClassVar[str] = "induction"

    alphabet: int = Field(default=26, ge=2, le=26)
    """Different letters."""

    answer_length: int = Field(default=1, ge=1)
    """Letters that follow the star."""

    depths: int = Field(default=11, ge=1)
    """Depths, evenly spaced from start to end, at which successive examples have the star."""

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        letters = symbols.LOWER[: self.alphabet]
        noise = symbols.text(rng, letters, spare)
        answer = symbols.text(rng, letters, self.answer_length)
        writing.depth = depth = depth_of(index, self.depths)
        at = round(depth * len(noise))
        writing.write(f"{noise[:at]}*{answer}{noise[at:]}*")
        writing.answer(answer)
