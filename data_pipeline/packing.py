"""How well a corpus's documents fit rows of one length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CHUNK = 2**20
"""Documents looked at at once: their places take 8 bytes each, and a corpus may have billions."""


@dataclass(frozen=True)
class Packing:
    """One epoch of a corpus in rows of seq_len tokens: documents laid end to end, and cut."""

    corpus: str
    seq_len: int
    rows: int

    documents: int
    tokens: int

    whole: int
    """Documents that lie in one row."""

    parts: int
    """Documents and parts of documents in all rows."""

    cut_tokens: int
    """Tokens of documents that lie in more than one row, or partly behind the last."""

    @property
    def lost(self) -> float:
        """Share of the tokens that fill no row: those at the end of the epoch's order."""
        return 1 - self.rows * self.seq_len / self.tokens

    def __str__(self) -> str:
        return (
            f"{self.corpus} in rows of {self.seq_len:,} tokens: {self.documents:,} documents, {self.tokens:,} tokens; "
            f"{self.whole / self.documents:.1%} of documents in one row, {self.parts / self.rows:.2f} documents per "
            f"row, {self.cut_tokens / self.tokens:.1%} of tokens in cut documents, {self.lost:.2%} of tokens left "
            "over at the end of an epoch"
        )


def packing(corpus: str, lengths: np.ndarray, order: np.ndarray, seq_len: int, rows: int) -> Packing:
    """How documents of these lengths in tokens, laid end to end in this order, lie in the first `rows` rows."""
    filled = rows * seq_len
    offset = whole = parts = cut = 0
    for start in range(0, len(order), _CHUNK):
        sizes = lengths[order[start : start + _CHUNK]].astype(np.int64)
        ends = offset + sizes.cumsum()
        begins, offset = ends - sizes, int(ends[-1])
        first_row, last_row = begins // seq_len, (ends - 1) // seq_len
        is_whole = (first_row == last_row) & (ends <= filled)
        whole += int(is_whole.sum())
        cut += int(sizes[~is_whole].sum())
        is_read = begins < filled
        parts += int((np.minimum(last_row, rows - 1) - first_row + 1)[is_read].sum())
    return Packing(corpus, seq_len, rows, len(order), offset, whole, parts, cut)


def packing_table(packings: Sequence[Packing]) -> str:
    """The same as a table in Markdown."""
    head = (
        "| corpus | tokens per row | documents | tokens | documents in one row | documents per row | "
        "tokens in cut documents | tokens left over |"
    )
    lines = [
        f"| {one.corpus} | {one.seq_len:,} | {one.documents:,} | {one.tokens:,} | {one.whole / one.documents:.1%} | "
        f"{one.parts / one.rows:.2f} | {one.cut_tokens / one.tokens:.1%} | {one.lost:.2%} |"
        for one in packings
    ]
    return "\n".join([head, "|---" * 8 + "|", *lines])
