"""The objective of a causal model: the next token in sequences of packed documents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.examples import Cut
from data_pipeline.order import Share
from data_pipeline.samples import BlendedSamples, SampleShard


def positions_of(doc_positions: Tensor, isolate_documents: bool, start: int) -> Tensor:
    """Positions (B, N) of tokens in their documents, or in their sequences if documents are not isolated.

    doc_positions: (B, N), as in `SampleShard`. start: index of the first token in its sequence.
    """
    if isolate_documents:
        return doc_positions
    return torch.arange(start, start + doc_positions.shape[1]).expand_as(doc_positions)


def next_tokens(sequences: Tensor, doc_positions: Tensor, isolate_documents: bool, start: int = 0) -> Batch:
    """The batch of a causal model from sequences or shards of them.

    sequences, doc_positions: (B, N + 1) int64; the last token is only a label. start: as for `positions_of`. If
    documents are isolated, the first token of a document is not predicted.
    """
    tokens, labels = sequences[:, :-1], sequences[:, 1:]
    loss_mask = doc_positions[:, 1:] != 0 if isolate_documents else torch.ones_like(labels, dtype=torch.bool)
    return Batch(tokens, labels, loss_mask, positions_of(doc_positions[:, :-1], isolate_documents, start))


@dataclass(frozen=True)
class PackedText:
    """Base of the objectives on packed documents."""

    samples: BlendedSamples
    isolate_documents: bool

    def cut(self) -> list[Cut]:
        """See `SampleObjective`; what packing cuts is in its statistics."""
        return []


class NextTokens(PackedText):
    """The objective of a causal model."""

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `SampleObjective`."""
        start, end = share.shard_of(self.samples.seq_len)
        shards = [self.samples.read(index, start, end + 1) for index in indices]
        sequences = torch.stack([cp_shard.tokens for cp_shard in shards])
        doc_positions = torch.stack([cp_shard.doc_positions for cp_shard in shards])
        batch = next_tokens(sequences, doc_positions, self.isolate_documents, start)
        if all(cp_shard.scored is None for cp_shard in shards):
            return batch
        scored = torch.stack([_scored_labels(cp_shard) for cp_shard in shards])
        return replace(batch, loss_mask=batch.loss_mask & scored)


def _scored_labels(cp_shard: SampleShard) -> Tensor:
    """Which of a shard's labels (N - 1,) are scored: those in answers, or all if answers are unknown."""
    return (
        torch.ones_like(cp_shard.tokens[1:], dtype=torch.bool)
        if cp_shard.scored is None
        else cp_shard.scored[1:]
    )
