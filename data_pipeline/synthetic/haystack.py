"""Something hidden in a long text: pass keys, needles, and chains of variables."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.random import Generator
from pydantic import Field

from . import symbols
from .filler import Filler
from .task import SyntheticTask, Writing


class Haystack(SyntheticTask):
    """A task whose statements are hidden in a filler's text."""

    filler: str = "sentences"
    """Text around it: sentences, validation (the run's validation documents, for evaluation), or a text file."""


class Passkey(Haystack):
    """A number stands somewhere in the text and is asked for at its end (Mohtashami and Jaggi, 2023)."""

    NAME: ClassVar[str] = "passkey"

    depths: int = Field(default=11, ge=1)
    """Depths, evenly spaced from start to end, at which successive examples hide what they ask for."""

    digits: int = Field(default=5, ge=1, le=18)
    """Of the number."""

    _INTRO: ClassVar[str] = "A pass key is hidden in the text below. Remember it.\n"
    _STATEMENT: ClassVar[str] = " The pass key is {}. Remember that {} is the pass key."
    _QUESTION: ClassVar[str] = "\nWhat is the pass key? The pass key is"

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        number = symbols.number(rng, self.digits)
        writing.depth = depth = depth_of(index, self.depths)
        writing.write(self._INTRO)
        text = filler(rng, spare)
        hide(writing, text, [(depth, self._STATEMENT.format(number, number))])
        writing.write(self._QUESTION)
        writing.answer(f" {number}")


class Needle(Haystack):
    """One of several statements of the same form is asked for (needle in a haystack, Kamradt 2023; RULER's keys)."""

    NAME: ClassVar[str] = "needle"

    depths: int = Field(default=11, ge=1)
    """Depths, evenly spaced from start to end, at which successive examples hide what they ask for."""

    needles: int = Field(default=1, ge=1)
    """Statements: one is asked for, the others, of other words, stand anywhere."""

    digits: int = Field(default=7, ge=1, le=18)
    """Of the numbers."""

    _STATEMENT: ClassVar[str] = " The special number of {} is {}."
    _QUESTION: ClassVar[str] = "\nWhat is the special number of {}? The special number of {} is"

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        words = symbols.words(rng, self.needles)
        numbers = [symbols.number(rng, self.digits) for _ in words]
        writing.depth = depth = depth_of(index, self.depths)
        depths = [depth, *rng.random(self.needles - 1)]
        statements = [
            (at, self._STATEMENT.format(word, number)) for at, word, number in zip(depths, words, numbers)
        ]
        hide(writing, filler(rng, spare), statements)
        writing.write(self._QUESTION.format(words[0], words[0]))
        writing.answer(f" {numbers[0]}")


class Variables(Haystack):
    """Variables that are assigned to each other: which of them hold a number? (variable tracking after RULER)."""

    NAME: ClassVar[str] = "variables"

    hops: int = Field(default=4, ge=0)
    """Assignments of a variable to the next one of its chain; hops + 1 variables are asked for."""

    chains: int = Field(default=2, ge=1)
    """Chains, each with a number of its own; the first is asked for."""

    _DIGITS: ClassVar[int] = 5
    _LETTERS: ClassVar[int] = 5
    _STATEMENT: ClassVar[str] = " VAR {} = {}."
    _QUESTION: ClassVar[str] = "\nWhich variables hold {}? In their order they are"

    def _write(self, writing: Writing, rng: Generator, index: int, spare: int, filler: Filler) -> None:
        names = symbols.distinct(rng, symbols.UPPER, self._LETTERS, self.chains * (self.hops + 1))
        chains = [names[at :: self.chains] for at in range(self.chains)]
        first = rng.integers(10 ** (self._DIGITS - 1), 10**self._DIGITS)
        statements: list[tuple[float, str]] = []
        for number, chain in enumerate(chains):
            # Numbers that differ, each of as many digits.
            low = 10 ** (self._DIGITS - 1)
            value = str(low + (first - low + 7919 * number) % (9 * low))
            held = [value, *(f"VAR {name}" for name in chain)]
            depths = np.sort(rng.random(len(chain)))
            statements += [
                (at, self._STATEMENT.format(name, of)) for at, name, of in zip(depths, chain, held)
            ]
        hide(writing, filler(rng, spare), statements)
        writing.write(self._QUESTION.format(first))
        for name in chains[0]:
            writing.answer(f" {name}")


def depth_of(index: int, depths: int) -> float:
    """The depth of an example, all depths in turn."""
    return (index % depths) / (depths - 1) if depths > 1 else 0.5


def hide(writing: Writing, text: str, statements: Sequence[tuple[float, str]]) -> None:
    """Write a text with statements at these depths of it, each before the word at its place."""
    begun = 0
    for depth, statement in sorted(statements):
        place = round(float(depth) * len(text))
        at = place if place == len(text) else max(text.rfind(" ", 0, place + 1), 0)
        at = max(at, begun)
        writing.write(text[begun:at])
        writing.write(statement)
        begun = at
    writing.write(text[begun:])
