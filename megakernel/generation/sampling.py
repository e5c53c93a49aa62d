"""Which token comes next: the part of the distribution that is drawn from, and the draw."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.config import UserError


@dataclass(frozen=True)
class Sampling:
    """The part of the distribution that tokens are drawn from.

    Raises UserError for values that leave none.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token."""

    top_k: int | None = None
    """Draw from this many likeliest tokens; None from all."""

    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that together have at least this probability."""

    min_p: float = 0.0
    """Draw from tokens with at least this share of the likeliest one's probability."""

    repetition_penalty: float = 1.0
    """Logits of tokens that the text has already are divided by it where they are positive, else multiplied."""

    def __post_init__(self):
        if self.temperature != 0 and not 1e-37 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} cannot be; give 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} leaves no token; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is no share; give more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} is no share; give 0 to 1")
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise UserError(
                f"repetition_penalty={self.repetition_penalty} cannot be; give 0.001 to 1000 (1 changes nothing)"
            )


DEFAULT = Sampling()
"""From the whole distribution, as it is."""


class Draw(NamedTuple):
    """How the next token of one text is drawn."""

    sampling: Sampling
    uniform: float
    """In [0, 1); see `uniform`."""

    seen: Tensor | None = None
    """int64 ids that the repetition penalty meets; None where there is no penalty."""


def uniform(*place: int) -> float:
    """The number in [0, 1) that belongs to (seed, sample, number of the token): of no other text and no batch."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token id for each row of logits (B, V), each by its own draw; the same on every device."""
    logits = logits.float().cpu()
    if any(draw.seen is not None for draw in draws):
        logits = logits.clone()
        for row, draw in zip(logits, draws):
            if draw.seen is not None:
                penalty, met = draw.sampling.repetition_penalty, row[draw.seen]
                row[draw.seen] = torch.where(met > 0, met / penalty, met * penalty)
    found: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature]
    if drawn:
        for row, token in zip(drawn, _drawn(logits[drawn], [draws[row] for row in drawn])):
            found[row] = token
    return found


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    samplings = [draw.sampling for draw in draws]
    # Counted from the largest, so that no temperature makes infinities of differences that are none.
    logits = logits - logits.amax(-1, keepdim=True)
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings])
    probabilities = (logits / temperatures).softmax(-1)
    for row, sampling in zip(probabilities, samplings):
        if sampling.top_k is not None or sampling.top_p < 1:
            _keep_likeliest(row, sampling)
        if sampling.min_p:
            row[row < sampling.min_p * row.max()] = 0.0
    reached = probabilities.double().cumsum(-1)
    uniforms = torch.tensor([[draw.uniform] for draw in draws], dtype=torch.float64)
    # The first token whose sum is beyond the number: one of probability 0 never is. Where a model gave what is no
    # number, none is; the last one lets the other texts of the batch go on.
    chosen = torch.searchsorted(reached, uniforms * reached[:, -1:], right=True)[:, 0]
    return chosen.clamp(max=logits.shape[-1] - 1).tolist()


def _keep_likeliest(row: Tensor, sampling: Sampling) -> None:
    """Zero in a row of probabilities (V,) what top_k and top_p leave out."""
    ordered, ids = row.sort(descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[sampling.top_k :] = 0.0
    # A token counts while those likelier than it do not reach top_p, so the likeliest always does, also where float32
    # has no number as small as top_p.
    before = ordered.cumsum(0) - ordered
    counts = before < sampling.top_p * ordered.sum()
    counts[0] = True
    row[ids] = ordered.where(counts, 0.0)
