"""How the next token is drawn from the model's distribution."""

from dataclasses import dataclass

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

    def __post_init__(self):
        if self.temperature != 0 and not 1e-37 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} cannot be; give 0 (the likeliest token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} leaves no token; give 1 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is no share; give more than 0 and at most 1")

    def draw(self, logits: Tensor, generator: torch.Generator) -> int:
        """One token id from logits (V,); the same for equal logits and generator states on every device."""
        logits = logits.float().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, ids = logits.sort(descending=True, stable=True)
        # Counted from the largest, so that no temperature makes infinities of differences that are none.
        probabilities = ((ordered - ordered[0]) / self.temperature).softmax(0)[: self.top_k]
        # A token counts while those likelier than it do not reach top_p, so the likeliest always does.
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities.where(before < self.top_p * probabilities.sum(), 0.0)
        return int(ids[torch.multinomial(probabilities, 1, generator=generator)])
