"""The order of samples: which rank reads which sample in which step.

Training consumes one endless stream of samples, or one per sequence length of its schedule. A sample's consumption
index is the number of samples consumed before it; with batches of G samples, global batch s holds the consumption
indices [s·G, (s+1)·G). The order depends neither on the number of steps nor on restarts.
"""

from dataclasses import dataclass

from megakernel.config.training import Phase


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one rank reads."""

    data_rank: int = 0
    """Data-parallel replica, of `data_size`."""

    data_size: int = 1

    cp_rank: int = 0
    """Shard of every sequence, of `cp_size` equal contiguous ones."""

    cp_size: int = 1

    def shard_of(self, seq_len: int) -> tuple[int, int]:
        """First token and end (exclusive) of the share's shard of a sequence."""
        assert seq_len % self.cp_size == 0, "config.rules cuts sequences evenly"
        length = seq_len // self.cp_size
        return self.cp_rank * length, (self.cp_rank + 1) * length


class ConsumptionOrder:
    """Stream indices by step; the global batches do not depend on replicas, micro-batch size or restarts."""

    def __init__(self, phase: Phase, share: Share):
        """The global batch is a whole number of micro-batches per replica (config.world checks it)."""
        training = phase.training
        assert training.global_batch_size % (training.micro_batch_size * share.data_size) == 0
        self._phase = phase
        self._training = training
        self._share = share
        start, stop = phase.stream_start, phase.stream_end
        ranges = [
            (max(first, start) - start, (end if stop is None else min(end, stop)) - start)
            for first, end in _disjoint(training.skip_samples)
        ]
        # Ranges of other phases are empty here.
        self._skipped = [(first, end) for first, end in ranges if first < end]

    def stream_length(self, steps: int) -> int:
        """Samples of the stream that are read or skipped in the first `steps` steps, up to the end of the phase."""
        return self._stream_index(self._phase.samples_before(min(steps, self._phase.end_step)))

    @property
    def micro_batches_per_step(self) -> int:
        """Forward passes of one replica per optimizer step."""
        return self._training.global_batch_size // (self._training.micro_batch_size * self._share.data_size)

    def indices(self, step: int) -> list[list[int]]:
        """Stream indices that this share reads in optimizer step `step` (from 0), one list per micro-batch."""
        size, before = self._training.global_batch_size, self._phase.samples_before(step)
        return [
            [self._stream_index(before + sample) for sample in samples]
            for samples in samples_by_pass(size, self._training.micro_batch_size, self._share)
        ]

    def _stream_index(self, consumed: int) -> int:
        """The stream index of a consumption index: each skipped range shifts all later samples."""
        index = consumed - self._phase.stream_start
        for first, end in self._skipped:
            if index < first:
                break
            index += end - first
        return index


def samples_by_pass(count: int, micro_batch_size: int, share: Share) -> list[range]:
    """The sequences, of `count`, that a share reads in each of its forward passes.

    Pass m of replica d starts at sequence (m·data_size + d)·micro_batch_size, so in every layout the first passes of
    all replicas together read the first sequences. If `count` does not divide, the last indices reach beyond it, so
    that every replica makes the same number of passes.
    """
    stride = share.data_size * micro_batch_size
    first = share.data_rank * micro_batch_size
    return [range(first + start, first + start + micro_batch_size) for start in range(0, count, stride)]


def _disjoint(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges merged: ascending and disjoint."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged
