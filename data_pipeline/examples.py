"""Examples of one or two documents each, shuffled as wholes: labeled documents, and texts with their translations."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_pipeline.batch import PADDING
from data_pipeline.blend import Blend
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.labels import read_labels
from data_pipeline.token_files import TokenFile


class CorpusExample(NamedTuple):
    """One example."""

    documents: list[np.ndarray]
    """Tokens of one or two documents, each with its end-of-document token."""

    label: int | float | None
    """Class index, or the number to predict; None for a text and its translation."""


class CorpusExamples:
    """The examples of one split of a corpus, epoch after epoch, each shuffled anew."""

    def __init__(self, corpus: PreparedCorpus, split: str, documents: int, seed: int):
        self._corpus, self._split = corpus, split
        self._documents = documents
        self._seed = seed
        self.per_epoch = examples_of(corpus, split, documents)
        # A batch spans at most two epochs, unless an epoch is shorter than a batch.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @cached_property
    def _tokens(self) -> TokenFile:
        return TokenFile(self._corpus.prefix(self._split))

    @cached_property
    def _labels(self) -> np.ndarray | None:
        return None if self._corpus.manifest.pairs else read_labels(self._corpus.folder, self._split)

    def build(self, samples: int) -> None:
        """Do nothing: the order is drawn while reading."""

    def __getitem__(self, index: int) -> CorpusExample:
        """Example `index` of the endless stream."""
        epoch, order_index = divmod(index, self.per_epoch)
        example = int(self._order(epoch)[order_index])
        first = example * self._documents
        documents = [self._tokens[document] for document in range(first, first + self._documents)]
        return CorpusExample(documents, None if self._labels is None else self._labels[example].item())

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self.per_epoch)


class WholeDocuments:
    """Examples of a split, each of whose documents has a sequence of its own, cut or padded to seq_len tokens."""

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        split: str,
        seq_len: int,
        seed: int,
        documents: int,
        periodic: bool = False,
        starts: Sequence[int] | None = None,
    ):
        """documents: number per example. periodic, starts: see `Blend`."""
        parts = [CorpusExamples(corpus, split, documents, seed) for corpus in corpora]
        self.samples = Blend(parts, example_weights(corpora, split, documents), periodic, starts)
        self._corpora, self._split, self._seq_len = corpora, split, seq_len


def examples_of(corpus: PreparedCorpus, split: str, documents: int) -> int:
    """Examples of one epoch, of so many documents each."""
    return corpus.record(split).documents // documents


def example_weights(corpora: Iterable[PreparedCorpus], split: str, documents: int) -> list[float]:
    """Relative shares: of examples, not tokens, since every example is one sample, however long."""
    return [corpus.weight or examples_of(corpus, split, documents) for corpus in corpora]


def padded(ids: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
    """At most seq_len ids as a sequence (seq_len,) int64, and their positions, PADDING behind them."""
    tokens = torch.zeros(seq_len, dtype=torch.int64)
    tokens[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
    positions = torch.arange(seq_len)
    return tokens, positions.where(positions < len(ids), PADDING)


@dataclass(frozen=True)
class Cut:
    """How many documents of a corpus are longer than the sequences that they are put into, one in each."""

    corpus: str
    seq_len: int

    documents: str
    """What they are, in the plural."""

    total: int
    cut: int

    longest: int
    """Tokens of the longest, with all that is put around it."""

    without_end: int = 0
    """Of those that are not cut: how many leave out their end-of-document token, and nothing else."""

    def __str__(self) -> str:
        share = f"{self.cut:,} {self.documents} ({self.cut / self.total:.1%})"
        parts = [f"{self.corpus}: {share} are cut at {self.seq_len:,} tokens"]
        if self.without_end:
            parts.append(f"{self.without_end:,} more leave out their end-of-document token alone")
        parts.append(f"the longest of {self.total:,} {self.documents} has {self.longest:,} tokens")
        return "; ".join(parts)


def cut_documents(
    corpora: Iterable[PreparedCorpus],
    split: str,
    seq_len: int,
    names: Sequence[str],
    added: int = 0,
    needs_end: bool = True,
) -> list[Cut]:
    """The cut documents of each corpus; reads only indices.

    names: of the first document of an example, of the second, ...; one name: of all. added: tokens that are put before
    each document. needs_end: whether a document without its end-of-document token counts as cut.
    """
    found = []
    for corpus in corpora:
        lengths = TokenFile(corpus.prefix(split)).sequence_lengths
        for first, name in enumerate(names):
            sizes = lengths[first :: len(names)] + added
            too_long, cut = (int((sizes > most).sum()) for most in (seq_len, seq_len + (not needs_end)))
            found.append(Cut(str(corpus), seq_len, name, len(sizes), cut, int(sizes.max()), too_long - cut))
    return found
