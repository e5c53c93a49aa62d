"""The sparsity task of *Learning the Transformer Kernel* (appendix E): which pairs of a long sequence matter to a sum.

A sequence is pairs of a value v of -1 or 1 and a flag a of 0 or 1; its class is the sum of v a over the sequence.
Flags are drawn with one probability, which is what makes sequences sparse or dense. Values are drawn evenly, but where
a prefix's sum would leave -4 to 4. Sums of -4 and 4 are then rarer than those between, so sequences are drawn until
one has the class that is
wanted: each class is a ninth of a split.

A pair is one symbol, such as `-1` for v = -1, a = 1: an embedding for each of the four is as much as the paper's, which
is linear in three bits.
"""

import random
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.generated import Count, GeneratedTask, Some
from megakernel.config.errors import Problem

LARGEST = 4
"""Largest prefix sum, either sign."""


class Sparsity(GeneratedTask):
    """Sequences of `length` pairs; the paper has 200,000 of them for each probability, a fifth held out."""

    NAME: ClassVar[str] = "sparsity"
    CLASSES: ClassVar[tuple[int, ...]] = tuple(range(-LARGEST, LARGEST + 1))

    train: Some = 160_000
    validation: Count = 40_000
    test: Count = 0

    p: float = Field(default=0.5, gt=0, lt=1)
    """Probability that a pair counts; the paper's are 0.1, 0.5 and 0.9."""

    length: int = Field(default=200, ge=1, le=1_000_000_000)
    """Pairs of a sequence."""

    def example(self, draw: random.Random, index: int) -> Document:
        """A sequence as symbols between spaces, and its sum."""
        wanted = self.CLASSES[index % len(self.CLASSES)]
        while True:
            pairs, total = self._row(draw)
            if total == wanted:
                return Document((" ".join(pairs),), total)

    def problems(self) -> Iterator[Problem]:
        """Sequences whose sums seldom reach the outer classes."""
        if self.length * self.p < len(self.CLASSES):
            fewest = int(len(self.CLASSES) / self.p) + 1
            yield Problem("length", self.length, "has too few pairs that count", f"set {fewest} or more")

    def _row(self, draw: random.Random) -> tuple[list[str], int]:
        pairs, total = [], 0
        for _ in range(self.length):
            counts = draw.random() < self.p
            value = draw.choice((-1, 1))
            if counts:
                if abs(total + value) > LARGEST:
                    value = -value
                total += value
            pairs.append(f"{'-' if value < 0 else '+'}{int(counts)}")
        return pairs, total
