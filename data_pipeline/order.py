"""Which sample is read when, and by whom.

Training consumes one endless stream of samples. Consumption index i is what training has consumed before;
global batch s holds the consumption indices [s·G, (s+1)·G). Nothing here knows how many steps a run has or
was restarted with.
"""

from dataclasses import dataclass

from megakernel.config.training import Training


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one process reads."""

    data_rank: int = 0
    """Which of `data_size` data-parallel replicas this process belongs to."""

    data_size: int = 1

    piece_rank: int = 0
    """Which of `piece_size` equal contiguous pieces of every sequence it holds."""

    piece_size: int = 1


class ConsumptionOrder:
    """Stream indices by step: the same global batches for any replicas, micro-batch size and restart."""

    def __init__(self, training: Training, share: Share):
        """The global batch is a whole number of micro-batches for every replica (config.world checks it)."""
        assert training.global_batch_size % (training.micro_batch_size * share.data_size) == 0
        self._training = training
        self._share = share
        self._skipped = _disjoint(training.skip_samples)

    @property
    def stream_length(self) -> int:
        """Samples of the stream that the whole run reads or passes over."""
        return self._stream_index(self._training.steps * self._training.global_batch_size)

    @property
    def micro_batches_per_step(self) -> int:
        """Forward passes of one replica per optimizer step."""
        return self._training.global_batch_size // (self._training.micro_batch_size * self._share.data_size)

    def indices(self, step: int) -> list[list[int]]:
        """Stream indices this share reads in optimizer step `step` (from 0), a list for each micro-batch."""
        size = self._training.global_batch_size
        return [
            [self._stream_index(step * size + row) for row in rows]
            for rows in rows_by_pass(size, self._training.micro_batch_size, self._share)
        ]

    def _stream_index(self, consumed: int) -> int:
        """The stream index of a consumption index: ranges passed over push everything behind them back."""
        for first, end in self._skipped:
            if consumed < first:
                break
            consumed += end - first
        return consumed


def rows_by_pass(count: int, micro_batch_size: int, share: Share) -> list[range]:
    """The rows, of `count`, that a share reads in each of its forward passes.

    Pass m of replica d reads the rows from (m·data_size + d)·micro_batch_size on: in every layout the first
    passes of all replicas together read the first rows. Where `count` does not divide, the last rows are
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
