"""Sampling of the next token: filters on the distribution, and the draw."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.config import UserError


@dataclass(frozen=True)
class Sampling:
    """The parameters of sampling. Raises UserError for invalid values."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""

    top_k: int | None = None
    """Draw from this many most likely tokens; None: from all."""

    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens with at least this total probability."""

    min_p: float = 0.0
    """Draw from tokens with at least this fraction of the most likely token's probability."""

    repetition_penalty: float = 1.0
    """Positive logits of tokens already in the text are divided by it, negative ones multiplied."""

    def __post_init__(self):
        if self.temperature != 0 and not 1e-37 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature={self.temperature} is out of range; give 0 (the most likely token) or more"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} leaves no token; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is out of range; give more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} is out of range; give 0 to 1")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise UserError(
                f"repetition_penalty={self.repetition_penalty} is out of range; give 0.001 to 1000 (1 changes nothing)"
            )


DEFAULT = Sampling()
"""Draws from the model's unmodified distribution."""


class Draw(NamedTuple):
    """The parameters of drawing one text's next token."""

    sampling: Sampling
    uniform: float
    """In [0, 1); see `uniform`."""

    seen: Tensor | None = None
    """int64 ids for the repetition penalty; None: no penalty."""


def uniform(*key: int) -> float:
    """A number in [0, 1): a hash of (seed, sample, token index), independent of other texts and the batch."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id per row of logits (B, V), each with its own draw; on the CPU, so that devices do not matter."""
    logits = logits.float().cpu()
    if any(draw.seen is not None for draw in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws):
            if draw.seen is not None:
                penalty, seen_logits = draw.sampling.repetition_penalty, row[draw.seen]
                row[draw.seen] = torch.where(seen_logits > 0, seen_logits / penalty, seen_logits * penalty)
    chosen: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature]
    if drawn:
        for row, token in zip(drawn, _sample(logits[drawn], [draws[row] for row in drawn])):
            chosen[row] = token
    return chosen


def _sample(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    samplings = [draw.sampling for draw in draws]
    # Relative to the maximum, so that a small temperature cannot turn equal logits into inf - inf.
    logits = logits - logits.amax(-1, keepdim=True)
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings])
    probabilities = (logits / temperatures).softmax(-1)
    for row, sampling in zip(probabilities, samplings):
        if sampling.top_k is not None or sampling.top_p < 1:
            _keep_likeliest(row, sampling)
        if sampling.min_p:
            row[row < sampling.min_p * row.max()] = 0.0
    cumulative = probabilities.double().cumsum(-1)
    uniforms = torch.tensor([[draw.uniform] for draw in draws], dtype=torch.float64)
    # Inverse CDF: the first token whose cumulative sum exceeds the number, never one of probability 0. With NaN logits
    # there is none; the clamp lets the other texts of the batch go on.
    chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1).tolist()


def _keep_likeliest(row: Tensor, sampling: Sampling) -> None:
    """Zero the probabilities (V,) that top_k and top_p exclude, in place."""
    ordered, ids = row.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = 0.0
    # Keep a token while the more likely ones do not reach top_p, so always the first, even if top_p underflows in
    # float32.
    before = ordered.cumsum(0) - ordered
    counts = before < sampling.top_p * ordered.sum()
    counts[0] = True
    row[ids] = ordered.where(counts, 0.0)
