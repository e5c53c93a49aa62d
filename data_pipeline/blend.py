"""Several corpora blended by weight into one endless stream of samples."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from data_pipeline.packing import Packing

BLEND_PERIOD = 2**16
"""Samples after which the blend's pattern repeats; every corpus occurs in it."""

Sample = TypeVar("Sample")
SampleOut = TypeVar("SampleOut", covariant=True)


class CorpusStream(Protocol[SampleOut]):
    """The samples of one corpus, epoch after epoch."""

    per_epoch: int

    def build(self, samples: int) -> None:
        """Build what reading the first `samples` samples needs."""

    def __getitem__(self, index: int) -> SampleOut:
        """Sample `index` of the corpus."""


class Blend(Generic[Sample]):
    """The stream that training consumes; as in Megatron, each sample is from the corpus furthest behind its weight."""

    def __init__(self, streams: Sequence[CorpusStream[Sample]], weights: Sequence[float]):
        """weights: the streams' relative shares of the samples."""
        self._streams = streams
        self._corpus_of = np.zeros(BLEND_PERIOD, dtype=np.int16)
        self._sample_of = np.zeros(BLEND_PERIOD, dtype=np.int64)
        if len(streams) == 1:
            self._sample_of[:] = np.arange(BLEND_PERIOD)
        else:
            from megatron.core.datasets import helpers  # an import of seconds, unneeded for one corpus

            shares = np.array(weights, dtype=np.float64)
            helpers.build_blending_indices(
                self._corpus_of, self._sample_of, shares / shares.sum(), len(streams), BLEND_PERIOD, False
            )
        self._counts = np.bincount(self._corpus_of, minlength=len(streams))

    @property
    def per_epoch(self) -> int:
        """Samples of one epoch of every corpus."""
        return sum(stream.per_epoch for stream in self._streams)

    def build(self, samples: int) -> None:
        """Build what reading the first `samples` samples needs, unless it exists."""
        periods, rest = divmod(samples, BLEND_PERIOD)
        needed = periods * self._counts + np.bincount(self._corpus_of[:rest], minlength=len(self._streams))
        for stream, count in zip(self._streams, needed):
            stream.build(int(count))

    def packing(self) -> list[Packing]:
        """Packing statistics of each corpus, if its sequences are packed; some samples must have been built."""
        return []

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` of the stream."""
        corpus, sample = self.locate(index)
        return self._streams[corpus][sample]

    def locate(self, index: int) -> tuple[int, int]:
        """The corpus of sample `index`, and the sample's index in that corpus."""
        period, offset = divmod(index, BLEND_PERIOD)
        corpus = int(self._corpus_of[offset])
        return corpus, int(period * self._counts[corpus] + self._sample_of[offset])
