"""Overlapping windows: each token of a document predicted once, all but its first with much before it."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from data_pipeline.batch import Batch
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.token_files import TokenFile, scored_prefix


class Window(NamedTuple):
    """Tokens [start, end) of a document are read; those from `scored` on predict what has not been predicted."""

    start: int
    scored: int
    end: int


def windows(tokens: int, seq_len: int, stride: int) -> Iterator[Window]:
    """The windows of a document of so many tokens, its end among them.

    The first has up to seq_len tokens, all scored; each further one ends `stride` tokens later, or where the
    document does. So every prediction behind the first window sees seq_len - stride tokens or more.
    """
    end = min(seq_len, tokens - 1)
    if end > 0:
        yield Window(0, 0, end)
    while end < tokens - 1:
        scored, end = end, min(end + stride, tokens - 1)
        yield Window(end - seq_len, scored, end)


class SlidingBatches:
    """The windows of the corpora's validation documents, each document by itself; these in an order drawn once."""

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        seq_len: int,
        stride: int,
        most: int,
        sequences: int,
        eod: int,
        answers: bool = False,
    ):
        """most: windows, of all corpora together. sequences: windows in a batch. answers: as of `CorpusSamples`."""
        self._files = [TokenFile(corpus.prefix("validation")) for corpus in corpora]
        self._answers = [
            TokenFile(scored_prefix(corpus.prefix("validation")))
            if (answers or corpus.is_chat) and corpus.record("validation").scored is not None
            else None
            for corpus in corpora
        ]
        self._seq_len = seq_len
        self._sequences = sequences
        self._eod = eod
        self._windows: list[tuple[int, int, Window]] = []
        for at, file in enumerate(self._files):
            share = -(-(most - len(self._windows)) // (len(self._files) - at))
            self._windows += islice(self._of(at, file, stride), share)
        self.samples = len(self._windows)
        """Windows."""

    def _of(self, at: int, file: TokenFile, stride: int) -> Iterator[tuple[int, int, Window]]:
        for document in np.random.default_rng(0).permutation(len(file)).tolist():
            for window in windows(int(file.sequence_lengths[document]), self._seq_len, stride):
                yield at, document, window

    def __len__(self) -> int:
        """Forward passes."""
        return -(-self.samples // self._sequences)

    def __iter__(self) -> Iterator[Batch]:
        """Windows in sequences of seq_len tokens; positions count from a window's start."""
        for begun in range(0, self.samples, self._sequences):
            yield self._batch(self._windows[begun : begun + self._sequences])

    def _batch(self, chosen: list[tuple[int, int, Window]]) -> Batch:
        sequences = torch.full((len(chosen), self._seq_len + 1), self._eod)
        counted = torch.zeros(len(chosen), self._seq_len, dtype=torch.bool)
        for row, (file, document, (start, scored, end)) in enumerate(chosen):
            length = end - start
            read = self._files[file].get(document, offset=start, length=length + 1)
            sequences[row, : length + 1] = torch.from_numpy(read.astype(np.int64))
            counted[row, scored - start : length] = True
            if (answers := self._answers[file]) is not None:
                counts = answers.get(document, offset=start + 1, length=length)
                counted[row, :length] &= torch.from_numpy(counts != 0)
        tokens, labels = sequences[:, :-1], sequences[:, 1:]
        return Batch(tokens, labels, counted, torch.arange(self._seq_len).repeat(len(sequences), 1))
