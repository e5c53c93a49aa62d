"""Sequences cut from packed documents, and the next token of each of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.order import Share
from data_pipeline.samples import BlendedSamples, SampleShard


def positions_of(places: Tensor, isolate_documents: bool, start: int) -> Tensor:
    """Each token's position (B, N): its place in its document, or in its sequence where documents are not isolated.

    places: (B, N), of `SampleShard`. start: the token of their sequences that they begin at.
    """
    return places if isolate_documents else torch.arange(start, start + places.shape[1]).expand_as(places)


def next_tokens(sequences: Tensor, places: Tensor, isolate_documents: bool, start: int = 0) -> Batch:
    """What a causal model reads of sequences or of shards of them.

    sequences, places: (B, N + 1) int64, the last token a label alone. start: as for `positions_of`. Where documents are
    isolated, the first token of one is no label.
    """
    tokens, labels = sequences[:, :-1], sequences[:, 1:]
    loss_mask = places[:, 1:] != 0 if isolate_documents else torch.ones_like(labels, dtype=torch.bool)
    return Batch(tokens, labels, loss_mask, positions_of(places[:, :-1], isolate_documents, start))


@dataclass(frozen=True)
class PackedText:
    """What the objectives of packed documents have in common."""

    samples: BlendedSamples
    isolate_documents: bool


class NextTokens(PackedText):
    """The objective of a causal model."""

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `Objective`."""
        start, end = share.shard_of(self.samples.seq_len)
        shards = [self.samples.read(index, start, end + 1) for index in indices]
        sequences = torch.stack([cp_shard.tokens for cp_shard in shards])
        places = torch.stack([cp_shard.places for cp_shard in shards])
        batch = next_tokens(sequences, places, self.isolate_documents, start)
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
