"""Which sample is read when, and by whom.

Training consumes samples of one endless stream, or of one for each length that its sequences have in turn. Consumption
index i is what training has consumed before; with batches of G samples, global batch s holds the consumption indices
[s·G, (s+1)·G). Nothing here knows how many steps a run has or was restarted with.
"""

from dataclasses import dataclass

from megakernel.config.training import Phase


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one process reads."""

    data_rank: int = 0
    """Which of `data_size` data-parallel replicas this process belongs to."""

    data_size: int = 1

    cp_rank: int = 0
    """Which of `cp_size` equal contiguous shards of every sequence it holds."""

    cp_size: int = 1

    def shard_of(self, seq_len: int) -> tuple[int, int]:
        """First token and end of the share's shard of a sequence."""
        assert seq_len % self.cp_size == 0, "config.checks cuts sequences evenly"
        length = seq_len // self.cp_size
        return self.cp_rank * length, (self.cp_rank + 1) * length


class ConsumptionOrder:
    """Stream indices by step: the same global batches for any replicas, micro-batch size and restart."""

    def __init__(self, phase: Phase, share: Share):
        """The global batch is a whole number of micro-batches for every replica (config.world checks it)."""
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
        # Those of other lengths have no sample left.
        self._skipped = [(first, end) for first, end in ranges if first < end]

    def stream_length(self, steps: int) -> int:
        """Samples of the stream that are read or passed over up to the end of the phase, or of `steps` steps."""
        return self._stream_index(self._phase.samples_before(min(steps, self._phase.end_step)))

    @property
    def micro_batches_per_step(self) -> int:
        """Forward passes of one replica per optimizer step."""
        return self._training.global_batch_size // (self._training.micro_batch_size * self._share.data_size)

    def indices(self, step: int) -> list[list[int]]:
        """Stream indices this share reads in optimizer step `step` (from 0), a list for each micro-batch."""
        size, before = self._training.global_batch_size, self._phase.samples_before(step)
        return [
            [self._stream_index(before + sample) for sample in samples]
            for samples in samples_by_pass(size, self._training.micro_batch_size, self._share)
        ]

    def _stream_index(self, consumed: int) -> int:
        """The stream index of a consumption index: ranges passed over push everything behind them back."""
        index = consumed - self._phase.stream_start
        for first, end in self._skipped:
            if index < first:
                break
            index += end - first
        return index


def samples_by_pass(count: int, micro_batch_size: int, share: Share) -> list[range]:
    """The sequences, of `count`, that a share reads in each of its forward passes.

    Pass m of replica d reads the sequences from (m·data_size + d)·micro_batch_size on: in every layout the first
    passes of all replicas together read the first sequences. Where `count` does not divide, the last sequences are
    `count` and above, so that every replica makes the same number of passes.
    """
    together = share.data_size * micro_batch_size
    first = share.data_rank * micro_batch_size
    return [range(first + start, first + start + micro_batch_size) for start in range(0, count, together)]


def _disjoint(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same integers in ascending ranges that do not overlap."""
    merged: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged
