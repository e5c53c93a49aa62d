"""The sparsity task of *Learning the Transformer Kernel* (appendix E): a sum over the flagged pairs of a long sequence.

A sequence is pairs of a value v of -1 or 1 and a flag a of 0 or 1; its class is the sum of v a. The flags' probability
makes sequences sparse or dense. Values are uniform, but flipped if a prefix sum would leave -4 to 4. Sums of -4 and 4
are rarer than the others, so sequences are redrawn until the sum is the wanted class: each class is a ninth of a split.

A pair is one symbol, such as `-1` for v = -1, a = 1: an embedding for each of the four symbols is as expressive as the
paper's, which is linear in three bits.
"""

import random
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from data_pipeline.document import Document
from data_pipeline.papers.generated import Count, GeneratedTask, PositiveCount
from megakernel.config.errors import Problem

LARGEST = 4
"""Largest absolute prefix sum."""


class Sparsity(GeneratedTask):
    """Sequences of `length` pairs; the paper has 200,000 per probability and holds out a fifth."""

    NAME: ClassVar[str] = "sparsity"
    CLASSES: ClassVar[tuple[int, ...]] = tuple(range(-LARGEST, LARGEST + 1))

    train: PositiveCount = 160_000
    validation: Count = 40_000
    test: Count = 0

    p: float = Field(default=0.5, gt=0, lt=1)
    """Probability that a pair is flagged; 0.1, 0.5 and 0.9 in the paper."""

    length: int = Field(default=200, ge=1, le=1_000_000_000)
    """Pairs of a sequence."""

    def example(self, rng: random.Random, index: int) -> Document:
        """A sequence as symbols separated by spaces, and its sum."""
        target = self.CLASSES[index % len(self.CLASSES)]
        while True:
            pairs, total = self._sequence(rng)
            if total == target:
                return Document((" ".join(pairs),), total)

    def problems(self) -> Iterator[Problem]:
        """Sequences so short that their sums rarely reach the outer classes."""
        if self.length * self.p < len(self.CLASSES):
            fewest = int(len(self.CLASSES) / self.p) + 1
            yield Problem("length", self.length, "has too few pairs that count", f"set {fewest} or more")

    def _sequence(self, rng: random.Random) -> tuple[list[str], int]:
        pairs, total = [], 0
        for _ in range(self.length):
            is_flagged = rng.random() < self.p
            value = rng.choice((-1, 1))
            if is_flagged:
                if abs(total + value) > LARGEST:
                    value = -value
                total += value
            pairs.append(f"{'-' if value < 0 else '+'}{int(is_flagged)}")
        return pairs, total
