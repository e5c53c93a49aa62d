"""Haystack tasks, with statements hidden in a long text: pass keys, needles, and chains of variables."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from megakernel.config.errors import Problem

from . import symbols
from .filler import Filler
from .task import ExampleBuilder, SyntheticTask


class Haystack(SyntheticTask):
    """A task whose statements are hidden in filler text."""

    filler: str = "sentences"
    """Filler text: sentences, validation (the run's validation documents, for evaluation), or a text file."""


class Passkey(Haystack):
    """A number is hidden in the text and asked for at the end (Mohtashami and Jaggi, 2023)."""

    NAME: ClassVar[str] = "passkey"

    depths: int = Field(default=11, ge=1)
    """Number of evenly spaced depths, from start to end, at which successive examples hide the asked statement."""

    digits: int = Field(default=5, ge=1, le=18)
    """Digits of the number."""

    _INTRO: ClassVar[str] = "A pass key is hidden in the text below. Remember it.\n"
    _STATEMENT: ClassVar[str] = " The pass key is {}. Remember that {} is the pass key."
    _QUESTION: ClassVar[str] = "\nWhat is the pass key? The pass key is"

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        number = symbols.number(rng, self.digits)
        builder.depth = depth = depth_of(index, self.depths)
        builder.write(self._INTRO)
        text = filler(rng, spare)
        hide(builder, text, [(depth, self._STATEMENT.format(number, number))])
        builder.write(self._QUESTION)
        builder.answer(f" {number}")


class Needle(Haystack):
    """The question asks for one of several similar statements (needle in a haystack, Kamradt 2023; RULER's keys)."""

    NAME: ClassVar[str] = "needle"

    depths: int = Field(default=11, ge=1)
    """Number of evenly spaced depths, from start to end, at which successive examples hide the asked statement."""

    needles: int = Field(default=1, ge=1)
    """Number of statements; one is asked for, the others have other words and random depths."""

    digits: int = Field(default=7, ge=1, le=18)
    """Digits of each number."""

    _STATEMENT: ClassVar[str] = " The special number of {} is {}."
    _QUESTION: ClassVar[str] = "\nWhat is the special number of {}? The special number of {} is"

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        words = symbols.words(rng, self.needles)
        numbers = [symbols.number(rng, self.digits) for _ in words]
        builder.depth = depth = depth_of(index, self.depths)
        depths = [depth, *rng.random(self.needles - 1)]
        statements = [
            (at, self._STATEMENT.format(word, number)) for at, word, number in zip(depths, words, numbers)
        ]
        hide(builder, filler(rng, spare), statements)
        builder.write(self._QUESTION.format(words[0], words[0]))
        builder.answer(f" {numbers[0]}")


class Variables(Haystack):
    """Variables are assigned to each other: which of them hold a given number? (RULER's variable tracking)."""

    NAME: ClassVar[str] = "variables"

    hops: int = Field(default=4, ge=0)
    """Assignments from variable to variable in each chain; the answer is hops + 1 variables."""

    chains: int = Field(default=2, ge=1)
    """Number of chains, each with its own number; the first is asked for."""

    _DIGITS: ClassVar[int] = 5
    _LETTERS: ClassVar[int] = 5
    _STATEMENT: ClassVar[str] = " VAR {} = {}."
    _QUESTION: ClassVar[str] = "\nWhich variables hold {}? In their order they are"

    def problems(self) -> Iterator[Problem]:
        """More variables than names."""
        yield from super().problems()
        variables, names = self.chains * (self.hops + 1), len(symbols.UPPER) ** self._LETTERS
        if variables > names:
            reason = f"and chains={self.chains} make {variables:,} variables, of {names:,} possible names"
            yield Problem("hops", self.hops, reason, "set fewer")

    def _write(self, builder: ExampleBuilder, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        names = symbols.distinct(rng, symbols.UPPER, self._LETTERS, self.chains * (self.hops + 1))
        chains = [names[at :: self.chains] for at in range(self.chains)]
        first = rng.integers(10 ** (self._DIGITS - 1), 10**self._DIGITS)
        statements: list[tuple[float, str]] = []
        for number, chain in enumerate(chains):
            # Distinct numbers, each of _DIGITS digits.
            low = 10 ** (self._DIGITS - 1)
            value = str(low + (first - low + 7919 * number) % (9 * low))
            texts = map(self._STATEMENT.format, chain, [value, *(f"VAR {name}" for name in chain)])
            statements += zip(np.sort(rng.random(len(chain))), texts)
        hide(builder, filler(rng, spare), statements)
        builder.write(self._QUESTION.format(first))
        for name in chains[0]:
            builder.answer(f" {name}")


def depth_of(index: int, depths: int) -> float:
    """The depth of an example, cycling through all depths."""
    return (index % depths) / (depths - 1) if depths > 1 else 0.5


def hide(builder: ExampleBuilder, text: str, statements: Sequence[tuple[float, str]]) -> None:
    """Write a text with each (depth, statement) inserted before the word at its depth."""
    written = 0
    for depth, statement in sorted(statements):
        target = round(float(depth) * len(text))
        at = target if target == len(text) else max(text.rfind(" ", 0, target + 1), 0)
        at = max(at, written)
        builder.write(text[written:at])
        builder.write(statement)
        written = at
    builder.write(text[written:])
