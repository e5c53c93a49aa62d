"""Labeled documents: the objective of a classifier or a regression."""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_pipeline.batch import PADDING, Batch
from data_pipeline.blend import Blend
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.document import Label
from data_pipeline.labels import read_labels
from data_pipeline.order import Share
from data_pipeline.token_files import TokenFile
from megakernel.config.errors import UserError
from megakernel.config.model import Classifier


class LabeledExample(NamedTuple):
    """One labeled example."""

    documents: list[np.ndarray]
    """Tokens of one or two documents, each with its end-of-document token."""

    label: int | float
    """Class index, or the number to predict."""


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
    def _labels(self) -> np.ndarray:
        return read_labels(self._corpus.folder, self._split)

    def build(self, samples: int) -> None:
        """Do nothing: the order is drawn while reading."""

    def __getitem__(self, index: int) -> LabeledExample:
        """Example `index` of the endless stream."""
        epoch, order_index = divmod(index, self.per_epoch)
        example = int(self._order(epoch)[order_index])
        first = example * self._documents
        documents = [self._tokens[document] for document in range(first, first + self._documents)]
        return LabeledExample(documents, self._labels[example].item())

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self.per_epoch)


def examples_of(corpus: PreparedCorpus, split: str, documents: int) -> int:
    """Examples of one epoch, of so many documents each."""
    return corpus.record(split).documents // documents


class LabeledDocuments:
    """One document per sequence, truncated or padded to seq_len tokens; an example's sequences are adjacent."""

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        split: str,
        seq_len: int,
        seed: int,
        documents: int,
        prefix: Sequence[int],
        periodic: bool = False,
        starts: Sequence[int] | None = None,
    ):
        """documents: number per example. prefix: ids put before every document. periodic, starts: see `Blend`."""
        parts = [CorpusExamples(corpus, split, documents, seed) for corpus in corpora]
        self.samples = Blend(parts, example_weights(corpora, split, documents), periodic, starts)
        self._seq_len = seq_len
        self._prefix = np.array(prefix, dtype=np.int64)

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `SampleObjective`; tokens and positions (examples x documents, seq_len), labels (examples,)."""
        assert share.cp_size == 1, "config.rules keeps labeled documents whole"
        examples = [self.samples[index] for index in indices]
        sequences = [self._sequence(document) for example in examples for document in example.documents]
        tokens, positions = map(torch.stack, zip(*sequences))
        labels = torch.tensor([example.label for example in examples])
        return Batch(tokens, labels, torch.ones_like(labels, dtype=torch.bool), positions)

    def _sequence(self, document: np.ndarray) -> tuple[Tensor, Tensor]:
        ids = np.concatenate([self._prefix, document])[: self._seq_len]
        tokens = torch.zeros(self._seq_len, dtype=torch.int64)
        tokens[: len(ids)] = torch.from_numpy(ids)
        positions = torch.arange(self._seq_len)
        return tokens, positions.where(positions < len(ids), PADDING)


def example_weights(corpora: Iterable[PreparedCorpus], split: str, documents: int) -> list[float]:
    """Relative shares: of examples, not tokens, since every example is one sample, however long."""
    return [corpus.weight or examples_of(corpus, split, documents) for corpus in corpora]


def check_labels(corpora: Iterable[tuple[str, PreparedCorpus]], classifier: Classifier) -> None:
    """UserError unless all corpora hold examples for this classifier; corpora: with the keys that name them."""
    known: list[Label] = []
    for key, corpus in corpora:
        labels = corpus.manifest.labels
        if labels is None:
            raise UserError(
                f"{key}={corpus} has no labels to classify by; prepare it with --labels KEY, "
                "or choose another model.kind"
            )
        expected = {"documents": labels.documents, "num_classes": len(labels.classes) or 1}
        for name, count in expected.items():
            if getattr(classifier, name) != count:
                raise UserError(
                    f"model.classifier.{name}={getattr(classifier, name)} does not fit {key}={corpus}, "
                    f"where it is {count}; set {count}"
                )
        known = known or labels.classes
        if labels.classes != known:
            raise UserError(
                f"{key}={corpus} has the classes {labels.classes}, corpora before it {known}; "
                "give corpora of the same classes"
            )
