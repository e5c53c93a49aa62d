"""Rows cut from packed documents, and the next token of each of their tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.order import Share
from data_pipeline.samples import BlendedSamples, SampleShard


def document_positions(tokens: Tensor, eod: int, isolate_documents: bool, first: Tensor | int = 0) -> Tensor:
    """Each token's place (B, N) in its document, or in its row where documents are not isolated.

    first: the place of each row's first token (B,), not 0 where these tokens are a later shard of a row. The
    end-of-document token belongs to the document it ends, so the next token has position 0. Positions count from the
    start of the document or of the row, whichever is later.
    """
    places = torch.arange(tokens.shape[1])
    before = torch.as_tensor(first).expand(len(tokens))[:, None]
    if not isolate_documents:
        return places + before
    # The document of the first token began at place -first.
    starts = (-before).repeat(1, tokens.shape[1])
    starts[:, 1:] = torch.where(tokens[:, :-1] == eod, places[1:], starts[:, 1:])
    return places - starts.cummax(dim=1).values


def next_tokens(rows: Tensor, eod: int, isolate_documents: bool, first: Tensor | int = 0) -> Batch:
    """What a causal model reads of rows or of shards of them.

    rows: (B, N + 1) int64, the last token a label alone. first: as for `document_positions`. Where documents are
    isolated, what follows an end is no label.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:]
    loss_mask = tokens != eod if isolate_documents else torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, labels, loss_mask, document_positions(tokens, eod, isolate_documents, first))


class NextTokens:
    """The objective of a causal model."""

    def __init__(self, samples: BlendedSamples, eod: int, isolate_documents: bool):
        self._samples = samples
        self._eod = eod
        self._isolate_documents = isolate_documents
        self.one_pass = samples.one_pass
        self.build = samples.build
        self.packing = samples.packing

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `Objective`."""
        start, end = share.shard_of(self._samples.seq_len)
        shards = [self._samples.read(index, start, end + 1) for index in indices]
        rows = torch.stack([cp_shard.tokens for cp_shard in shards])
        first = first_places(shards, start, self._isolate_documents)
        batch = next_tokens(rows, self._eod, self._isolate_documents, first)
        if all(cp_shard.scored is None for cp_shard in shards):
            return batch
        scored = torch.stack([_scored_labels(cp_shard) for cp_shard in shards])
        return replace(batch, loss_mask=batch.loss_mask & scored)


def _scored_labels(cp_shard: SampleShard) -> Tensor:
    """Which of a shard's labels (N - 1,) count by themselves: those of answers, or all where no answers are known."""
    return (
        torch.ones_like(cp_shard.tokens[1:], dtype=torch.bool)
        if cp_shard.scored is None
        else cp_shard.scored[1:]
    )


def first_places(shards: Sequence[SampleShard], start: int, isolate_documents: bool) -> Tensor:
    """The position (B,) of the first token of shards that begin at token `start` of their rows."""
    return torch.tensor([cp_shard.position if isolate_documents else start for cp_shard in shards])
