"""Where streams read in the passes over a corpus: no text again before all of it has been read.

A run reads one stream per sequence length and mixture (`DataPhase`). A pass over a corpus is its documents in a drawn
order, the same for every length, cut into samples and read in another drawn order. A stream that other lengths follow
takes the samples [first, end) of a pass, as many as its steps read; the next length begins behind `end`. Streams of one
length continue each other, sample by sample, also if the corpus has another weight. So the order depends on where
lengths and mixtures begin, and not on how long the run is.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

from data_pipeline.blend import BlendOrder


class EpochPart(NamedTuple):
    """Samples [first, end) of one pass over a corpus, in the pass's order."""

    epoch: int
    first: int
    end: int


@dataclass(frozen=True)
class Reading:
    """The samples of one length that a run reads of a corpus, in order."""

    per_epoch: int
    """Samples of a whole pass."""

    parts: tuple[EpochPart, ...] = ()
    """Where it reads first."""

    next_epoch: int = 0
    """The first of the whole passes behind the parts."""

    _ends: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(part.end - part.first for part in self.parts)))

    def locate(self, index: int) -> tuple[EpochPart, int]:
        """The part that sample `index` is in, and its place there."""
        at = bisect_right(self._ends, index)
        if at < len(self.parts):
            return self.parts[at], index - (self._ends[at - 1] if at else 0)
        passes, place = divmod(index - (self._ends[-1] if self._ends else 0), self.per_epoch)
        return EpochPart(self.next_epoch + passes, 0, self.per_epoch), place

    def parts_of(self, samples: int) -> Iterator[EpochPart]:
        """The parts that the first `samples` samples are in."""
        index = 0
        while index < samples:
            part, place = self.locate(index)
            yield part
            index += part.end - part.first - place


class Place(NamedTuple):
    """Where a stream reads a corpus."""

    reading: Reading

    start: int
    """Samples of the reading that streams before it take."""


class Source(NamedTuple):
    """A corpus of a stream."""

    content: str
    """Equal for equal text, such as a hash."""

    per_epoch: int


@dataclass(frozen=True)
class Stream:
    """One stream of a run."""

    unit: int
    """Tokens per sample; for examples, which are the same in all lengths, always 1."""

    sources: list[Source]

    order: BlendOrder
    """Which source each sample comes from."""

    samples: int | None
    """Samples of the stream; None for the last."""

    planned: int | None
    """Samples until its length ends, as planned when the run began it; None: the length had no end."""


def places(streams: Sequence[Stream], unread_first: bool) -> list[list[Place]]:
    """Where each stream reads each of its corpora; unread_first: whether a length reads on behind the one before it."""
    positions: dict[str, tuple[int, int]] = {}  # pass and token behind all text that was taken
    found: list[list[Place]] = []
    for unit, group in groupby(streams, key=lambda stream: stream.unit):
        block = list(group)
        taken: Counter[str] = Counter()
        starts = []
        for stream in block:
            starts.append([taken[source.content] for source in stream.sources])
            taken.update(_counts(stream, stream.samples))
        last = block[-1]
        planned = None
        if last.planned is not None:
            planned = sum((_counts(one, one.samples) for one in block[:-1]), _counts(last, last.planned))
        readings = {}
        sources = {source.content: source for stream in block for source in stream.sources}
        for source in sources.values():
            position = positions.get(source.content, (0, 0)) if unread_first else (0, 0)
            first = _first_part(position, unit, source.per_epoch)
            samples = planned[source.content] if planned is not None and unread_first else None
            readings[source.content] = _reading(first, source.per_epoch, samples)
            count = taken[source.content] if samples is None else samples
            positions[source.content] = _behind(first, source.per_epoch, count, unit)
        for stream, start in zip(block, starts):
            found.append([Place(readings[one.content], at) for one, at in zip(stream.sources, start)])
    return found


def _counts(stream: Stream, samples: int | None) -> Counter[str]:
    """Content -> how many of the stream's first samples it has."""
    counts: Counter[str] = Counter()
    for source, count in zip(stream.sources, stream.order.counts(samples) if samples else ()):
        counts[source.content] += int(count)
    return counts


def _first_part(position: tuple[int, int], unit: int, per_epoch: int) -> EpochPart:
    """What is left of a pass behind a token: whole samples of this length."""
    epoch, token = position
    first = -(-token // unit)
    return EpochPart(epoch, first, per_epoch) if first < per_epoch else EpochPart(epoch + 1, 0, per_epoch)


def _reading(first: EpochPart, per_epoch: int, samples: int | None) -> Reading:
    """From the first part on; with a planned number of samples, only text that these fill is drawn from."""
    if samples is None:
        return Reading(per_epoch, (first,), first.epoch + 1)
    parts, left, part = [], samples, first
    while left > 0:
        end = min(part.end, part.first + left)
        parts.append(EpochPart(part.epoch, part.first, end))
        left -= end - part.first
        part = EpochPart(part.epoch + 1, 0, per_epoch)
    # More than planned, after a change of training.skip_samples, comes from passes that nothing else has begun.
    return Reading(per_epoch, tuple(parts), part.epoch)


def _behind(first: EpochPart, per_epoch: int, samples: int, unit: int) -> tuple[int, int]:
    """Pass and token behind the first samples from a part on."""
    left = samples - (first.end - first.first)
    if left < 0:
        return first.epoch, (first.first + samples) * unit
    return first.epoch + 1 + left // per_epoch, left % per_epoch * unit
