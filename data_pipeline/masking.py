"""The objective of a masked language model: predicting hidden tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.order import Share
from data_pipeline.packed_text import PackedText, positions_of
from megakernel.config.data import Masking


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's ids, 0 to `size` - 1, and the further ids of encoders."""

    size: int
    eod: int

    bos: int | None = None
    """The token that documents begin with."""

    @property
    def mask(self) -> int:
        """Id of a masked token."""
        return self.size

    @property
    def cls(self) -> int:
        """Id put before a document, for classification ([CLS])."""
        return self.size + 1


def hide(
    tokens: Tensor,
    masking: Masking,
    vocabulary: Vocabulary,
    seed: Sequence[int],
    start: int = 0,
    seq_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence (N,) as the model sees it, and which of its tokens are to be predicted (N,) bool.

    start, seq_len: if `tokens` is a shard, its first token in the sequence and the sequence's length. Each shard draws
    for the whole sequence, so sharding does not change the result. End-of-document and BOS are never hidden.
    """
    rng = np.random.default_rng(seed)
    length, cp_shard = len(tokens) if seq_len is None else seq_len, slice(start, start + len(tokens))
    selection, replacement = torch.from_numpy(rng.random((2, length))[:, cp_shard])
    random_tokens = torch.from_numpy(rng.integers(vocabulary.size, size=length)[cp_shard])
    hidden = (selection < masking.rate) & (tokens != vocabulary.eod)
    if vocabulary.bos is not None:
        hidden &= tokens != vocabulary.bos
    masked = hidden & (replacement < masking.mask_share)
    randomized = hidden & ~masked & (replacement < masking.mask_share + masking.random_share)
    return torch.where(masked, vocabulary.mask, torch.where(randomized, random_tokens, tokens)), hidden


@dataclass(frozen=True)
class MaskedTokens(PackedText):
    """The objective of a masked language model.

    The hidden tokens of a sample depend on (seed, its index in the stream): each epoch hides others, and neither
    restarts nor layouts change them.
    """

    masking: Masking
    vocabulary: Vocabulary
    seed: int

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `SampleObjective`."""
        seq_len = self.samples.seq_len
        start, end = share.shard_of(seq_len)
        shards = [self.samples.read(index, start, end) for index in indices]
        masked = [
            hide(cp_shard.tokens, self.masking, self.vocabulary, (self.seed, index), start, seq_len)
            for cp_shard, index in zip(shards, indices)
        ]
        labels = torch.stack([cp_shard.tokens for cp_shard in shards])
        tokens, hidden = map(torch.stack, zip(*masked))
        doc_positions = torch.stack([cp_shard.doc_positions for cp_shard in shards])
        return Batch(tokens, labels, hidden, positions_of(doc_positions, self.isolate_documents, start))
