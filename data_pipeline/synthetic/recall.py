"""Recall of symbols: associative recall, copying, induction."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from megakernel.config.errors import Problem

from . import symbols
from .filler import Filler
from .haystack import depth_of
from .task import ExampleBuilder, SyntheticTask


class Recall(SyntheticTask):
    """A short sequence of symbols."""

    length: int = Field(default=128, ge=2, le=1_000_000_000)
    """Tokens of an example, including end-of-document."""


class Mqar(Recall):
    """Multi-query associative recall (Zoology, section 4): pairs of key and value, then keys that ask for their values.

    Keys are lowercase letters, values uppercase, and digits fill the gaps between queries, which are uniformly random
    (the paper's follow a power law).
    """

    NAME: ClassVar[str] = "mqar"

    pairs: int = Field(default=8, ge=1)
    """Number of key-value pairs."""

    queries: int | None = Field(default=None, ge=1)
    """Number of keys that are asked for, each once; null asks for all."""

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
        """More pairs than distinct keys, or more queries than pairs."""
        yield from super().problems()
        if self.pairs > len(symbols.LOWER) ** self.key_length:
            reason = (
                f"exceeds the {len(symbols.LOWER) ** self.key_length} keys of key_length={self.key_length}"
            )
            yield Problem("pairs", self.pairs, reason, f"set key_length={self.key_length + 1}")
        if self.asked > self.pairs:
            yield Problem("queries", self.queries, f"exceeds pairs={self.pairs}", f"set at most {self.pairs}")

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        space = " " * self.spaced
        keys = symbols.distinct(rng, symbols.LOWER, self.key_length, self.pairs)
        values = [symbols.text(rng, symbols.UPPER, self.value_length) for _ in keys]
        for key, value in zip(keys, values):
            builder.write(f"{space}{key}{space}{value}")
        noise = symbols.text(rng, symbols.DIGITS, spare)
        cuts = np.sort(rng.integers(spare + 1, size=self.asked)).tolist()
        for at, start, end in zip(rng.permutation(self.pairs), [0, *cuts], cuts):
            builder.write(f"{noise[start:end]}{space}{keys[at]}")
            builder.answer(f"{space}{values[at]}")
        builder.write(noise[cuts[-1] :])


class Copy(Recall):
    """Random letters, a bar, and the same letters to repeat."""

    NAME: ClassVar[str] = "copy"

    alphabet: int = Field(default=26, ge=2, le=26)
    """Number of different letters."""

    answer_length: int = Field(default=8, ge=1)
    """Letters that are scored together as one answer."""

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        count = 1 + spare // 2
        letters = symbols.text(rng, symbols.LOWER[: self.alphabet], count)
        # An odd spare character becomes a bar in front.
        builder.write("|" * (spare % 2) + letters + "|")
        for start in range(0, count, self.answer_length):
            builder.answer(letters[start : start + self.answer_length])


class Induction(Recall):
    """Random letters with one star, repeated at the end: what followed it must follow again (induction heads, H3)."""

    NAME: ClassVar[str] = "induction"

    alphabet: int = Field(default=26, ge=2, le=26)
    """Number of different letters."""

    answer_length: int = Field(default=1, ge=1)
    """Letters that follow the star."""

    depths: int = Field(default=11, ge=1)
    """Number of evenly spaced depths, from start to end, at which successive examples have the star."""

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        letters = symbols.LOWER[: self.alphabet]
        noise = symbols.text(rng, letters, spare)
        answer = symbols.text(rng, letters, self.answer_length)
        builder.depth = depth = depth_of(index, self.depths)
        at = round(depth * len(noise))
        builder.write(f"{noise[:at]}*{answer}{noise[at:]}*")
        builder.answer(answer)
