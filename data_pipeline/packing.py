"""Packing statistics: how well a corpus's documents fit sequences of one length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 2**20
"""Documents processed at once, to bound memory: a corpus may have billions, at 8 bytes each per array."""


@dataclass(frozen=True)
class Packing:
    """One epoch of a corpus: documents concatenated and cut into sequences of seq_len tokens."""

    corpus: str
    seq_len: int
    sequences: int

    documents: int
    tokens: int

    whole: int
    """Documents that fit in one sequence without being cut."""

    parts: int
    """Documents and parts of documents in all sequences."""

    cut_tokens: int
    """Tokens of documents that were cut, or that reach past the last sequence."""

    @property
    def lost(self) -> float:
        """Share of the tokens left over at the end of the epoch, which fill no sequence."""
        return 1 - self.sequences * self.seq_len / self.tokens

    def __str__(self) -> str:
        whole, cut = self.whole / self.documents, self.cut_tokens / self.tokens
        return "\n  ".join(
            [
                f"{self.corpus} in sequences of {self.seq_len:,} tokens:",
                f"{self.documents:,} documents, {self.tokens:,} tokens; "
                f"{self.parts / self.sequences:.2f} documents per sequence",
                f"{whole:.1%} of documents in one sequence, {cut:.1%} of tokens in cut documents",
                f"{self.lost:.2%} of tokens left over at the end of an epoch",
            ]
        )


def pack(corpus: str, lengths: np.ndarray, order: np.ndarray, seq_len: int, sequences: int) -> Packing:
    """The statistics of documents of these lengths in tokens, concatenated in this order, in `sequences` sequences."""
    filled = sequences * seq_len
    offset = whole = parts = cut = 0
    for start in range(0, len(order), _CHUNK):
        sizes = lengths[order[start : start + _CHUNK]].astype(np.int64)
        ends = offset + sizes.cumsum()
        starts, offset = ends - sizes, int(ends[-1])
        first, last = starts // seq_len, (ends - 1) // seq_len
        is_whole = (first == last) & (ends <= filled)
        whole += int(is_whole.sum())
        cut += int(sizes[~is_whole].sum())
        is_read = starts < filled
        parts += int((np.minimum(last, sequences - 1) - first + 1)[is_read].sum())
    return Packing(corpus, seq_len, sequences, len(order), offset, whole, parts, cut)


def packing_table(packings: Sequence[Packing]) -> str:
    """The statistics as a Markdown table."""
    head = (
        "| corpus | tokens per sequence | documents | tokens | documents in one sequence | documents per sequence | "
        "tokens in cut documents | tokens left over |"
    )
    lines = [
        f"| {one.corpus} | {one.seq_len:,} | {one.documents:,} | {one.tokens:,} | {one.whole / one.documents:.1%} | "
        f"{one.parts / one.sequences:.2f} | {one.cut_tokens / one.tokens:.1%} | {one.lost:.2%} |"
        for one in packings
    ]
    return "\n".join([head, "|---" * 8 + "|", *lines])
