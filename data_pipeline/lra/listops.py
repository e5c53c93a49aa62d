"""ListOps: nested list operations written out, whose value, a digit, is the class.

The rules are those of the published generator (google-research/long-range-arena, `lra_benchmarks/data/listops.py`): a
node is an operator with probability 0.25, else a digit; at the greatest depth it is a digit. Operator, number of
arguments and digits are uniform. An expression is drawn again until its length lies between the bounds, both excluded.
Its length counts each operator twice, for the bracket that closes it. Parentheses, which the published files write
around every argument, are stripped there when they are read, and here too; none are written.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.generated import Count, GeneratedTask, Some
from data_pipeline.published import Published
from data_pipeline.sources import tsv_rows
from megakernel.config.errors import Problem

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
"""Least, greatest, median (of an even number the mean of the middle two, rounded down), and sum modulo 10."""

END = "]"
OPERATOR_PROBABILITY = 0.25

_FILES = {"basic_train.tsv": "train", "basic_val.tsv": "validation", "basic_test.tsv": "test"}
_DIGITS = [str(digit) for digit in range(10)]


class _TooLongError(Exception):
    """The expression has passed the bound."""


class ListOps(GeneratedTask):
    """Expressions of `min_length` < tokens < `max_length`."""

    NAME: ClassVar[str] = "lra:listops"
    CLASSES: ClassVar[tuple[int, ...]] = tuple(range(10))

    train: Some = 96_000
    validation: Count = 2_000
    test: Count = 2_000

    min_length: int = Field(default=500, ge=0)
    """Tokens that an expression has more than."""

    max_length: int = Field(default=2_000, ge=1, le=10_000_000)
    """Tokens that it has fewer than."""

    max_depth: int = Field(default=10, ge=1, le=100)
    """Depth, counted from 1 at the root, whose nodes are digits."""

    max_args: int = Field(default=10, ge=2, le=1_000)
    """Most arguments of an operator; the fewest are 2."""

    def example(self, draw: random.Random, index: int) -> Document:
        """An expression as symbols between spaces, and its value."""
        while True:
            tokens: list[str] = []
            try:
                value = self._grow(draw, tokens, 1)
            except _TooLongError:
                continue
            if len(tokens) > self.min_length:
                return Document((" ".join(tokens),), value)

    def problems(self) -> Iterator[Problem]:
        """Lengths that no expression has."""
        longest = 1
        for _ in range(1, self.max_depth):
            longest = 2 + self.max_args * longest
        if longest <= self.min_length:
            reason = f"is more than depth {self.max_depth} reaches"
            yield Problem("min_length", self.min_length, reason, f"set less than {longest}")
        if self.max_length - self.min_length < 10:
            yield Problem(
                "max_length", self.max_length, "leaves too few lengths", f"set {self.min_length + 10} or more"
            )

    def _grow(self, draw: random.Random, tokens: list[str], depth: int) -> int:
        """Append a node's symbols and return its value."""
        if depth >= self.max_depth or draw.random() >= OPERATOR_PROBABILITY:
            if len(tokens) + 1 >= self.max_length:
                raise _TooLongError
            digit = draw.randrange(10)
            tokens.append(str(digit))
            return digit
        operator = draw.choice(OPERATORS)
        tokens.append(operator)
        arguments = [self._grow(draw, tokens, depth + 1) for _ in range(draw.randint(2, self.max_args))]
        tokens.append(END)
        if len(tokens) >= self.max_length:
            raise _TooLongError
        return _value(operator, arguments)


class PublishedListOps(Published):
    """Expressions from a folder in the published form: `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv`."""

    classes = ListOps.CLASSES

    def __init__(self, where: str):
        """where: folder. Raises UserError where one of the files is missing."""
        super().__init__(ListOps.NAME, where, "the folder listops-1000 of the arena's release", _FILES)

    def _read_file(self, file: Path) -> Iterator[Document]:
        for row in tsv_rows(file, ("Source", "Target")):
            if row is None or row["Target"] not in _DIGITS:
                self.skipped["no expression with its value"] += 1
                continue
            symbols = [symbol for symbol in row["Source"].split() if symbol not in ("(", ")")]
            yield Document((" ".join(symbols),), int(row["Target"]))


def _value(operator: str, arguments: list[int]) -> int:
    if operator == "[MIN":
        return min(arguments)
    if operator == "[MAX":
        return max(arguments)
    if operator == "[SM":
        return sum(arguments) % 10
    ordered, half = sorted(arguments), len(arguments) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
