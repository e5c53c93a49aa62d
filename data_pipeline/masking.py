"""Tokens that are hidden from a masked language model, which has to find them again."""

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
    """The tokenizer's ids, 0 to `size` - 1, and those that encoders know besides them."""

    size: int
    eod: int

    bos: int | None = None
    """What documents begin with."""

    @property
    def mask(self) -> int:
        """Stands for a hidden token."""
        return self.size

    @property
    def document(self) -> int:
        """Stands for a whole document, before its tokens."""
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

    start, seq_len: where the tokens are a shard of a sequence of seq_len tokens, its first. A function of (sequence,
    seed) alone, whatever the shards: each draws for the whole sequence. Ends of documents and BOS are never hidden.
    """
    draw = np.random.default_rng(seed)
    whole, cp_shard = len(tokens) if seq_len is None else seq_len, slice(start, start + len(tokens))
    chosen, kind = torch.from_numpy(draw.random((2, whole))[:, cp_shard])
    others = torch.from_numpy(draw.integers(vocabulary.size, size=whole)[cp_shard])
    hidden = (chosen < masking.rate) & (tokens != vocabulary.eod)
    if vocabulary.bos is not None:
        hidden &= tokens != vocabulary.bos
    masked = hidden & (kind < masking.mask_share)
    swapped = hidden & ~masked & (kind < masking.mask_share + masking.random_share)
    return torch.where(masked, vocabulary.mask, torch.where(swapped, others, tokens)), hidden


@dataclass(frozen=True)
class MaskedTokens(PackedText):
    """The objective of a masked language model.

    What is hidden in a sample depends on (seed, its place in the stream): a text that comes again in a later
    epoch has other tokens hidden, and neither a restart nor a layout changes any.
    """

    masking: Masking
    vocabulary: Vocabulary
    seed: int

    def batch(self, indices: Sequence[int], share: Share) -> Batch:
        """See `Objective`."""
        seq_len = self.samples.seq_len
        start, end = share.shard_of(seq_len)
        shards = [self.samples.read(index, start, end) for index in indices]
        masked = [
            hide(cp_shard.tokens, self.masking, self.vocabulary, (self.seed, index), start, seq_len)
            for cp_shard, index in zip(shards, indices)
        ]
        labels = torch.stack([cp_shard.tokens for cp_shard in shards])
        tokens, hidden = map(torch.stack, zip(*masked))
        places = torch.stack([cp_shard.places for cp_shard in shards])
        return Batch(tokens, labels, hidden, positions_of(places, self.isolate_documents, start))
