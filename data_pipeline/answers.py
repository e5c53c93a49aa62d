"""Tokens of a text some of which are answers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.tokenizers import Tokenizer


class AnsweredTokens(NamedTuple):
    """A text's tokens."""

    tokens: list[int]
    """With what documents begin with, without the end."""

    answers: list[tuple[int, int]]
    """First token and end of each answer."""

    def scored(self) -> np.ndarray:
        """(tokens + 1,) uint8: 1 for the tokens of answers, 0 for the others and the document's end."""
        flags = np.zeros(len(self.tokens) + 1, dtype=np.uint8)
        for start, end in self.answers:
            flags[start:end] = 1
        return flags


def encode_answered(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> AnsweredTokens:
    """The tokens of a text and of the answers in it, which are stretches of characters in order.

    Answers and what stands between them are encoded apart, so no token lies across an answer's edge.
    """
    pieces, is_answer, begun = [], [], 0
    for start, end in answers:
        pieces += [text[begun:start], text[start:end]]
        is_answer += [False, True]
        begun = end
    pieces.append(text[begun:])
    is_answer.append(False)
    tokens = tokenizer.prefix
    places = []
    for ids, scored in zip(tokenizer.encode_batch(pieces), is_answer):
        if scored:
            places.append((len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return AnsweredTokens(tokens, places)
