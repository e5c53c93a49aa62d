"""Several corpora blended by weight into one endless stream of samples."""

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np

from data_pipeline.packing import Packing

BLEND_PERIOD = 2**16
"""Samples after which the pattern of a periodic blend repeats."""

Sample = TypeVar("Sample")
SampleOut = TypeVar("SampleOut", covariant=True)


class CorpusStream(Protocol[SampleOut]):
    """The samples of one corpus, epoch after epoch."""

    per_epoch: int

    def build(self, samples: int) -> None:
        """Build what reading the first `samples` samples needs."""

    def __getitem__(self, index: int) -> SampleOut:
        """Sample `index` of the corpus."""


class BlendOrder(Protocol):
    """Which corpus each sample of a blend comes from."""

    def counts(self, samples: int) -> np.ndarray:
        """Samples (corpora,) int64 of each corpus among the first `samples`."""

    def locate(self, index: int) -> tuple[int, int]:
        """The corpus of sample `index`, and the sample's index in that corpus."""


class OneCorpus:
    """The order of a single corpus."""

    def counts(self, samples: int) -> np.ndarray:
        """See `BlendOrder`."""
        return np.array([samples])

    def locate(self, index: int) -> tuple[int, int]:
        """See `BlendOrder`."""
        return 0, index


class ExactOrder:
    """An order in which every corpus has its share of the first n samples, for every n, to one sample.

    It depends only on the weights. Reading any index takes O(corpora x log) time, and the memory of a few blocks: the
    counts before multiples of _BLOCK are found by bisection, each between two of coarser multiples. Within a block
    the samples are scheduled as unit jobs, earliest deadline first. Sample k of a corpus of share w must come after
    k / w - 1 samples of the blend and before (k + 1) / w, as in a fair schedule of periodic tasks.
    """

    def __init__(self, weights: Sequence[float]):
        """weights: the corpora's relative shares, positive."""
        # fsum and products round alike on every machine, unlike numpy's sums.
        total = math.fsum(weights)
        self._shares = np.array([weight / total for weight in weights])
        exponents = np.frexp(self._shares)[1]
        self._scales = [np.flatnonzero(exponents == exponent) for exponent in np.unique(exponents)[::-1]]
        self._counts = lru_cache(maxsize=4 * _LOG_END)(self._bisected)
        self._block = lru_cache(maxsize=4)(self._scheduled)

    def counts(self, samples: int) -> np.ndarray:
        """See `BlendOrder`."""
        block, rest = divmod(samples, _BLOCK)
        before = self._counts(block * _BLOCK)
        if rest == 0:
            return before
        return before + np.bincount(self._block(block)[0][:rest], minlength=len(before))

    def locate(self, index: int) -> tuple[int, int]:
        """See `BlendOrder`."""
        block, offset = divmod(index, _BLOCK)
        corpora, samples = self._block(block)
        return int(corpora[offset]), int(samples[offset])

    def _bisected(self, samples: int) -> np.ndarray:
        """Counts of each corpus before a multiple of _BLOCK, between those of its neighbors at twice the distance."""
        assert samples <= 2**_LOG_END
        if samples == 0:
            counts = np.zeros(len(self._shares), dtype=np.int64)
        elif samples == 2**_LOG_END:
            counts = self._rounded(samples, self._counts(0), np.full(len(self._shares), samples))
        else:
            distance = samples & -samples
            counts = self._rounded(
                samples, self._counts(samples - distance), self._counts(samples + distance)
            )
        counts.flags.writeable = False  # it is cached
        return counts

    def _rounded(self, samples: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The shares of `samples` as whole numbers from low to high (corpora,) that add up to `samples`.

        Rounding up and down cancels within each power of two of the shares, largest first: corpora of large shares
        that were all behind would have to catch up within a few samples.
        """
        wanted = self._shares * samples
        counts = np.clip(np.floor(wanted).astype(np.int64), low, high)
        behind = 0.0
        for scale in self._scales:
            behind += math.fsum((wanted[scale] - counts[scale]).tolist())
            behind -= _distribute(counts, scale, round(behind), wanted, low, high)
        everywhere = np.arange(len(counts))
        while missing := samples - int(counts.sum()):
            _distribute(counts, everywhere, missing, wanted, low, high)
        return counts

    def _scheduled(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Corpus, and index in that corpus, of each sample (_BLOCK,) of a block."""
        start = block * _BLOCK
        before = self._counts(start)
        counts = self._counts(start + _BLOCK) - before
        corpora = np.repeat(np.arange(len(counts)), counts)
        samples = np.arange(_BLOCK) - np.repeat(counts.cumsum() - counts, counts) + before[corpora]
        release, deadline = np.floor(samples / self._shares[corpora]), (samples + 1) / self._shares[corpora]
        order = np.argsort(release, kind="stable")
        waiting = list(zip(release[order].tolist(), deadline[order].tolist(), order.tolist()))[::-1]
        released: list[tuple[float, int]] = []
        schedule = []
        for now in range(start, start + _BLOCK):
            while waiting and (waiting[-1][0] <= now or not released):
                _, until, job = waiting.pop()
                heapq.heappush(released, (until, job))
            schedule.append(heapq.heappop(released)[1])
        return corpora[schedule], samples[schedule]


_BLOCK = 2**12
"""Samples that are scheduled at once."""

_LOG_END = 44
"""Log2 of the samples after which the bisection ends; more than any run reads."""


def _distribute(
    counts: np.ndarray, among: np.ndarray, number: int, wanted: np.ndarray, low: np.ndarray, high: np.ndarray
) -> int:
    """Add `number` (or take it away, if negative) to counts `among` some corpora, one each, those furthest off first.

    Returns how much was added: less if the others have come to `high` (or `low`).
    """
    sign = 1 if number > 0 else -1
    free = among[counts[among] < high[among]] if sign > 0 else among[counts[among] > low[among]]
    chosen = free[np.argsort(-sign * (wanted - counts)[free], kind="stable")[: abs(number)]]
    counts[chosen] += sign
    return sign * len(chosen)


class PeriodicOrder:
    """The order of runs that earlier versions began: Megatron's over BLEND_PERIOD samples, again and again.

    A corpus of a share below 1 / BLEND_PERIOD is read too often, or never.
    """

    def __init__(self, weights: Sequence[float]):
        """weights: the corpora's relative shares."""
        from megatron.core.datasets import helpers  # an import of seconds

        self._corpus_of = np.zeros(BLEND_PERIOD, dtype=np.int16)
        self._sample_of = np.zeros(BLEND_PERIOD, dtype=np.int64)
        shares = np.array(weights, dtype=np.float64)
        helpers.build_blending_indices(
            self._corpus_of, self._sample_of, shares / shares.sum(), len(shares), BLEND_PERIOD, False
        )
        self._per_period = np.bincount(self._corpus_of, minlength=len(shares))

    def counts(self, samples: int) -> np.ndarray:
        """See `BlendOrder`."""
        periods, rest = divmod(samples, BLEND_PERIOD)
        return periods * self._per_period + np.bincount(
            self._corpus_of[:rest], minlength=len(self._per_period)
        )

    def locate(self, index: int) -> tuple[int, int]:
        """See `BlendOrder`."""
        period, offset = divmod(index, BLEND_PERIOD)
        corpus = int(self._corpus_of[offset])
        return corpus, int(period * self._per_period[corpus] + self._sample_of[offset])


def blend_order(weights: Sequence[float], periodic: bool = False) -> BlendOrder:
    """The order of corpora of these relative shares; periodic: that of earlier versions."""
    if len(weights) == 1:
        return OneCorpus()
    return PeriodicOrder(weights) if periodic else ExactOrder(weights)


class Blend(Generic[Sample]):
    """The stream that training consumes."""

    def __init__(
        self,
        streams: Sequence[CorpusStream[Sample]],
        weights: Sequence[float],
        periodic: bool = False,
        starts: Sequence[int] | None = None,
    ):
        """weights, periodic: see `blend_order`. starts: first sample of each stream that is read; None: 0."""
        self._streams = streams
        self._starts = starts or [0] * len(streams)
        self._order = blend_order(weights, periodic)

    @property
    def per_epoch(self) -> int:
        """Samples of one epoch of every corpus."""
        return sum(stream.per_epoch for stream in self._streams)

    def build(self, samples: int) -> None:
        """Build what reading the first `samples` samples needs, unless it exists."""
        for stream, start, count in zip(self._streams, self._starts, self.counts(samples)):
            stream.build(start + int(count))

    def counts(self, samples: int) -> np.ndarray:
        """Samples (streams,) int64 of each stream among the first `samples`."""
        return self._order.counts(samples)

    def passes(self, samples: int) -> np.ndarray:
        """Passes (streams,) float64 over each stream that the first `samples` samples are."""
        return self.counts(samples) / [stream.per_epoch for stream in self._streams]

    def packing(self) -> list[Packing]:
        """Packing statistics of each corpus, if its sequences are packed; some samples must have been built."""
        return []

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` of the stream."""
        corpus, sample = self.locate(index)
        return self._streams[corpus][sample]

    def locate(self, index: int) -> tuple[int, int]:
        """The corpus of sample `index`, and the sample's index in that corpus."""
        corpus, sample = self._order.locate(index)
        return corpus, self._starts[corpus] + sample
