"""Rows cut from packed documents, and the next token of each of their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.samples import BlendedSamples


def document_positions(tokens: Tensor, eod: int, isolate_documents: bool) -> Tensor:
    """Each token's place (B, N) in its document, or in its row where documents are not isolated.

    The end-of-document token belongs to the document it ends, so the next token has position 0. Positions
    count from the start of the document or of the row, whichever is later.
    """
    places = torch.arange(tokens.shape[1])
    if not isolate_documents:
        return places.expand_as(tokens)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(tokens[:, :-1] == eod, places[1:], 0)
    return places - starts.cummax(dim=1).values


def next_tokens(rows: Tensor, eod: int, isolate_documents: bool) -> Batch:
    """What a causal model reads of whole samples.

    rows: (B, seq_len + 1) int64. Where documents are isolated, what follows an end is no label.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:]
    loss_mask = tokens != eod if isolate_documents else torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, labels, loss_mask, document_positions(tokens, eod, isolate_documents))


class NextTokens:
    """The objective of a causal model."""

    def __init__(self, samples: BlendedSamples, eod: int, isolate_documents: bool):
        self._samples = samples
        self._eod = eod
        self._isolate_documents = isolate_documents
        self.one_pass = samples.one_pass
        self.build = samples.build

    def batch(self, indices: Sequence[int]) -> Batch:
        """See `Objective`."""
        rows = torch.stack([self._samples[index] for index in indices])
        return next_tokens(rows, self._eod, self._isolate_documents)
