"""Labeled documents: the objective of a classifier or a regression."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.document import Label
from data_pipeline.examples import Cut, WholeDocuments, cut_documents, padded
from data_pipeline.order import Share
from megakernel.config.errors import UserError
from megakernel.config.model import Classifier


class LabeledDocuments(WholeDocuments):
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
        """prefix: ids put before every document. The others: see `WholeDocuments`."""
        super().__init__(corpora, split, seq_len, seed, documents, periodic, starts)
        self._prefix = np.array(prefix, dtype=np.int64)

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `SampleObjective`; tokens and positions (examples x documents, seq_len), labels (examples,)."""
        assert share.cp_size == 1, "config.rules keeps labeled documents whole"
        examples = [self.samples[index] for index in indices]
        sequences = [self._sequence(document) for example in examples for document in example.documents]
        tokens, positions = map(torch.stack, zip(*sequences))
        labels = torch.tensor([example.label for example in examples])
        return Batch(tokens, labels, torch.ones_like(labels, dtype=torch.bool), positions)

    def cut(self) -> list[Cut]:
        """See `SampleObjective`."""
        names, added = ("documents",), len(self._prefix)
        return cut_documents(self._corpora, self._split, self._seq_len, names, added, needs_end=False)

    def _sequence(self, document: np.ndarray) -> tuple[Tensor, Tensor]:
        return padded(np.concatenate([self._prefix, document])[: self._seq_len], self._seq_len)


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
