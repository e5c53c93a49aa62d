"""A text under way: the model's state behind its tokens, how the next one is drawn, and text as tokens come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data_pipeline.tokenizers import Tokenizer
from megakernel.config import UserError

if TYPE_CHECKING:
    from megakernel.model import LanguageModel


class Decoder:
    """Reads tokens into the model's recurrent state.

    Between calls it holds the state alone: a constant number of numbers for kernelized and windowed layers, the keys
    and values of all tokens for full softmax layers.
    """

    def __init__(self, model: "LanguageModel", eod: int, isolate_documents: bool, chunk_size: int = 512):
        """eod: the end-of-document token, behind which positions restart where documents are isolated.

        chunk_size: most tokens of one forward pass, which bounds the memory that a prompt takes.
        """
        self._model = model
        self._device = model.output_matrix.device
        self._restarts_after = eod if isolate_documents else None
        self._chunk_size = chunk_size
        self._position = 0
        self.states: list[Any] | None = None
        """One state for each layer; None before the first token."""

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Tensor:
        """Read one or more tokens; logits (V,) of the token after the last."""
        for start in range(0, len(tokens), self._chunk_size):
            chunk = tokens[start : start + self._chunk_size]
            ids, positions = (
                torch.tensor([row], device=self._device) for row in (chunk, self._places(chunk))
            )
            hidden, self.states = self._model.extend(ids, positions, self.states)
        return self._model.logits(hidden[-1:])[0, -1]

    def _places(self, tokens: Sequence[int]) -> list[int]:
        """Positions as in training (data_pipeline.loader.cut)."""
        places = []
        for token in tokens:
            places.append(self._position)
            self._position = 0 if token == self._restarts_after else self._position + 1
        return places


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


_CUT = "\ufffd"
"""What a tokenizer decodes a character to of which bytes are missing."""

_CONTEXT = 8
"""Tokens before the new ones that are decoded with them: some tokenizers drop a space at the start of a text."""


class TextStream:
    """Turns tokens into text as soon as their characters are whole."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """prompt: the tokens before; their text is not repeated."""
        self._tokenizer = tokenizer
        self._said = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text that the token completes; empty inside a character of several tokens."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(_CUT):
            return ""
        self._said, self._pending = (self._said + self._pending)[-_CONTEXT:], []
        return text

    def end(self) -> str:
        """The text of tokens that never made a whole character."""
        return self._text()

    def _text(self) -> str:
        before = self._tokenizer.decode(self._said)
        return self._tokenizer.decode(self._said + self._pending)[len(before) :]
