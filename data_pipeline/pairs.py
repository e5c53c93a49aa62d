"""Pairs of a text and its translation: the objective of an encoder-decoder."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from data_pipeline.batch import PADDING, Batch
from data_pipeline.corpus import PreparedCorpus
from data_pipeline.document import DOCUMENTS_PER_PAIR
from data_pipeline.examples import CorpusExample, Cut, WholeDocuments, cut_documents, padded
from data_pipeline.order import Share
from megakernel.config.errors import UserError


class TranslationPairs(WholeDocuments):
    """A source and its target per example.

    The decoder reads the end-of-document token and the target, and predicts the target and its end.
    """

    def __init__(
        self,
        corpora: list[PreparedCorpus],
        split: str,
        seq_len: int,
        seed: int,
        eod: int,
        periodic: bool = False,
        starts: Sequence[int] | None = None,
    ):
        """eod: end-of-document token. The others: see `WholeDocuments`."""
        super().__init__(corpora, split, seq_len, seed, DOCUMENTS_PER_PAIR, periodic, starts)
        self._eod = np.array([eod], dtype=np.int64)

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `SampleObjective`; labels and loss mask are of the targets, (examples, seq_len).

        Tokens and positions (2 x examples, seq_len): row 2i has source i, and row 2i + 1 what the decoder reads of
        target i. A source that is cut keeps its end-of-document token. A target that is cut has none among its labels,
        since the text goes on there.
        """
        assert share.cp_size == 1, "config.rules keeps pairs whole"
        examples = [self.samples[index] for index in indices]
        targets = [example.documents[1][: self._seq_len] for example in examples]
        rows = [
            ids
            for example, target in zip(examples, targets)
            for ids in (self.source(example), np.concatenate([self._eod, target[:-1]]))
        ]
        tokens, positions = map(torch.stack, zip(*(padded(ids, self._seq_len) for ids in rows)))
        labels, places = map(torch.stack, zip(*(padded(target, self._seq_len) for target in targets)))
        return Batch(tokens, labels, places != PADDING, positions)

    def cut(self) -> list[Cut]:
        """See `SampleObjective`."""
        names = ("source texts", "target texts")
        return cut_documents(self._corpora, self._split, self._seq_len, names)

    def source(self, example: CorpusExample) -> np.ndarray:
        """What the encoder reads of an example: all tokens, or the first and the end."""
        source = example.documents[0]
        if len(source) <= self._seq_len:
            return source
        return np.concatenate([source[: self._seq_len - 1], self._eod])


def check_pairs(
    corpora: Iterable[tuple[str, PreparedCorpus]], otherwise: str = "choose another model.kind"
) -> None:
    """UserError unless all corpora hold pairs; corpora: with the keys that name them. otherwise: another remedy."""
    for key, corpus in corpora:
        if not corpus.manifest.pairs:
            raise UserError(
                f"{key}={corpus} holds no pairs of a text and its translation; prepare it with --second-text-key KEY, "
                f"or {otherwise}"
            )


def check_no_pairs(corpora: Iterable[PreparedCorpus], key: str) -> None:
    """UserError, naming `key`, if a corpus holds pairs, which only an encoder-decoder reads as such."""
    if pairs := [str(corpus) for corpus in corpora if corpus.manifest.pairs]:
        raise UserError(
            f"{key}={', '.join(pairs)} holds pairs of a text and its translation; set model.kind: encoder_decoder, or "
            "prepare without --second-text-key"
        )
