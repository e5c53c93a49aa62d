"""Several corpora as one endless stream, each with its share of the samples."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from data_pipeline.packing import Packing

BLEND_PERIOD = 2**16
"""Samples after which the pattern of the blend repeats, each corpus in it at least once."""

Sample = TypeVar("Sample")
SampleOut = TypeVar("SampleOut", covariant=True)


class Part(Protocol[SampleOut]):
    """The samples of one corpus, epoch after epoch."""

    per_epoch: int

    def build(self, samples: int) -> None:
        """Make what reading the first `samples` samples needs."""

    def __getitem__(self, index: int) -> SampleOut:
        """Sample `index` of the corpus."""


class Blend(Generic[Sample]):
    """The stream that training consumes.

    Megatron's blending takes the next sample from the corpus that is furthest behind its weight.
    """

    def __init__(self, parts: Sequence[Part[Sample]], weights: Sequence[float]):
        """weights: the parts' relative shares of the samples."""
        self._parts = parts
        self._which = np.zeros(BLEND_PERIOD, dtype=np.int16)
        self._rank = np.zeros(BLEND_PERIOD, dtype=np.int64)
        if len(parts) == 1:
            self._rank[:] = np.arange(BLEND_PERIOD)
        else:
            from megatron.core.datasets import helpers  # seconds, which a blend of one need not wait for

            shares = np.array(weights, dtype=np.float64)
            helpers.build_blending_indices(
                self._which, self._rank, shares / shares.sum(), len(parts), BLEND_PERIOD, False
            )
        self._counts = np.bincount(self._which, minlength=len(parts))

    @property
    def one_pass(self) -> int:
        """Samples after which, at the latest, every corpus begins to repeat."""
        return sum(part.per_epoch for part in self._parts)

    def build(self, samples: int) -> None:
        """Make what reading the first `samples` samples needs and is not there yet."""
        periods, rest = divmod(samples, BLEND_PERIOD)
        needed = periods * self._counts + np.bincount(self._which[:rest], minlength=len(self._parts))
        for part, count in zip(self._parts, needed):
            part.build(int(count))

    def packing(self) -> list[Packing]:
        """How each corpus's documents lie in sequences, where sequences are packed; something is built."""
        return []

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` of the stream."""
        part, place = self.locate(index)
        return self._parts[part][place]

    def locate(self, index: int) -> tuple[int, int]:
        """Which corpus sample `index` of the stream comes from, and which of that corpus's samples it is."""
        period, place = divmod(index, BLEND_PERIOD)
        part = int(self._which[place])
        return part, int(period * self._counts[part] + self._rank[place])
