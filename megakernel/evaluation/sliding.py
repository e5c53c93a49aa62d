"""Sliding windows: each token of a document is predicted once, with a long context except in the first window."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from data_pipeline.batch import Batch
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.token_files import TokenFile


class ScoredWindow(NamedTuple):
    """Tokens [start, end) of a document; what those from `scored` on predict is scored, the rest only read."""

    start: int
    scored: int
    end: int


_Located = tuple[int, int, ScoredWindow]
"""Index of the corpus, index of the document in it, and window."""


def windows(tokens: int, seq_len: int, stride: int) -> Iterator[ScoredWindow]:
    """The windows of a document of `tokens` tokens, including end-of-document.

    The first has up to seq_len tokens, all scored; each further one ends `stride` tokens later, or where the document
    does. Every prediction after the first window thus sees at least seq_len - stride tokens.
    """
    end = min(seq_len, tokens - 1)
    if end > 0:
        yield ScoredWindow(0, 0, end)
    while end < tokens - 1:
        scored, end = end, min(end + stride, tokens - 1)
        yield ScoredWindow(end - seq_len, scored, end)


class SlidingBatches:
    """Batches of windows of the corpora's validation documents, which are shuffled once with a fixed seed."""

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        seq_len: int,
        stride: int,
        max_windows: int,
        sequences: int,
        eod: int,
        answers: bool = False,
    ):
        """max_windows: of all corpora together. sequences: windows per batch. answers: as for `CorpusSamples`."""
        self._files = [TokenFile(corpus.prefix("validation")) for corpus in corpora]
        self._answers = [corpus.scored_file("validation", answers) for corpus in corpora]
        self._seq_len = seq_len
        self._sequences = sequences
        self._eod = eod
        self._windows: list[_Located] = []
        for corpus, file in enumerate(self._files):
            share = -(-(max_windows - len(self._windows)) // (len(self._files) - corpus))
            self._windows += islice(self._windows_of(corpus, file, stride), share)
        self.samples = len(self._windows)
        """Number of windows."""

    def _windows_of(self, corpus: int, file: TokenFile, stride: int) -> Iterator[_Located]:
        for document in np.random.default_rng(0).permutation(len(file)).tolist():
            for window in windows(int(file.sequence_lengths[document]), self._seq_len, stride):
                yield corpus, document, window

    def __len__(self) -> int:
        """Number of forward passes."""
        return -(-self.samples // self._sequences)

    def __iter__(self) -> Iterator[Batch]:
        """Batches of sequences of seq_len tokens; positions count from a window's start."""
        for first in range(0, self.samples, self._sequences):
            yield self._batch(self._windows[first : first + self._sequences])

    def _batch(self, chosen: list[_Located]) -> Batch:
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
