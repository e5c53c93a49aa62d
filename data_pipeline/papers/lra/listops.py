"""ListOps: nested list operations; the class is the value of the expression, a digit.

The rules are those of the published generator (google-research/long-range-arena, `lra_benchmarks/data/listops.py`): a
node is an operator with probability 0.25, otherwise a digit; at the maximum depth it is a digit. Operator, number of
arguments and digits are uniform. Expressions are redrawn until the length lies strictly between the bounds. The length
counts each operator twice, for its closing bracket. The published files put parentheses around every argument, which
the arena strips when it reads them; so does this reader, and the generator writes none.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.papers.generated import Count, GeneratedTask, PositiveCount
from data_pipeline.papers.published import Published
from data_pipeline.sources import tsv_rows
from megakernel.config.errors import Problem, UserError

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
"""Minimum, maximum, median (of an even number, the mean of the middle two rounded down), and sum modulo 10."""

END = "]"
OPERATOR_PROBABILITY = 0.25
DRAWS = 1_000_000
"""Attempts at an expression within the bounds; the arena's take 15 on average."""

_FILES = {"basic_train.tsv": "train", "basic_val.tsv": "validation", "basic_test.tsv": "test"}
_DIGITS = [str(digit) for digit in range(10)]


class _TooLongError(Exception):
    """The expression has reached the maximum length."""


class ListOps(GeneratedTask):
    """Expressions of `min_length` < tokens < `max_length`."""

    NAME: ClassVar[str] = "lra:listops"
    CLASSES: ClassVar[tuple[int, ...]] = tuple(range(10))

    train: PositiveCount = 96_000
    validation: Count = 2_000
    test: Count = 2_000

    min_length: int = Field(default=500, ge=0)
    """Exclusive lower bound of an expression's tokens."""

    max_length: int = Field(default=2_000, ge=1, le=10_000_000)
    """Exclusive upper bound of its tokens."""

    max_depth: int = Field(default=10, ge=1, le=100)
    """Depth (1 at the root) at which all nodes are digits."""

    max_args: int = Field(default=10, ge=2, le=1_000)
    """Maximum number of arguments of an operator; the minimum is 2."""

    def example(self, rng: random.Random, index: int) -> Document:
        """An expression as symbols separated by spaces, and its value. UserError if the bounds fit hardly any."""
        for _ in range(DRAWS):
            tokens: list[str] = []
            try:
                value = self._grow(rng, tokens, 1)
            except _TooLongError:
                continue
            if len(tokens) > self.min_length:
                return Document((" ".join(tokens),), value)
        raise UserError(
            f"--source {self.NAME}: of {DRAWS:,} random expressions none has more than {self.min_length} and less than "
            f"{self.max_length} tokens; set a smaller min_length, or a larger max_depth or max_length"
        )

    def problems(self) -> Iterator[Problem]:
        """Bounds that no expression can satisfy, or too narrow ones."""
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

    def _grow(self, rng: random.Random, tokens: list[str], depth: int) -> int:
        """Append a node's symbols and return its value."""
        if depth >= self.max_depth or rng.random() >= OPERATOR_PROBABILITY:
            if len(tokens) + 1 >= self.max_length:
                raise _TooLongError
            digit = rng.randrange(10)
            tokens.append(str(digit))
            return digit
        operator = rng.choice(OPERATORS)
        tokens.append(operator)
        arguments = [self._grow(rng, tokens, depth + 1) for _ in range(rng.randint(2, self.max_args))]
        tokens.append(END)
        if len(tokens) >= self.max_length:
            raise _TooLongError
        return _value(operator, arguments)


class PublishedListOps(Published):
    """Expressions from the published files `basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv`."""

    classes = ListOps.CLASSES

    def __init__(self, where: str):
        """where: folder. Raises UserError if a file is missing."""
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
