"""Bits per byte: a loss that runs with different tokenizers can be compared by."""

import math

from data_pipeline.corpus import Corpora


def bits_per_byte(loss: float, corpora: Corpora, split: str) -> float:
    """loss in nats per token -> bits per UTF-8 byte of the split's text."""
    return loss / math.log(2) / corpora.bytes_per_token(split)
