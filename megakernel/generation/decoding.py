"""The decoder: a batch of texts as the model's recurrent states after their tokens."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import states

if TYPE_CHECKING:
    from megakernel.model import LanguageModel


class Decoder:
    """Reads tokens of one or more texts into the model's recurrent states.

    Between calls it holds only the states: of constant size for kernelized and windowed layers; for full softmax layers
    the keys and values of all tokens, left-padded to the longest text.
    """

    def __init__(self, model: "LanguageModel", eod: int, isolate_documents: bool, chunk_size: int = 512):
        """eod: the end-of-document token, after which positions restart if documents are isolated.

        chunk_size: maximum tokens per text and forward pass, which bounds the memory of a prompt.
        """
        self._model = model
        self._device = model.output_matrix.device
        self._restarts_after = eod if isolate_documents else None
        self._chunk_size = chunk_size
        self.positions = [0]
        """Position of each text's next token in its document."""

        self.states: list[Any] | None = None
        """One state per layer; None before the first token."""

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read the same number of tokens (at least 1) of each text; returns the logits (B, V) of the next tokens."""
        return self.logits(self.hidden(tokens)[-1:])[:, 0]

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read as `read` does; returns the final hidden states (N, B, hidden) of the last N <= chunk_size tokens."""
        length = len(tokens[0])
        for start in range(0, length, self._chunk_size):
            chunks = [row[start : start + self._chunk_size] for row in tokens]
            places = [self._next_positions(row, chunk) for row, chunk in enumerate(chunks)]
            ids = torch.tensor(chunks, device=self._device)
            hidden, self.states = self._model.extend(ids, torch.tensor(places), self.states)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits (B, N, V) of the tokens that follow final hidden states (N, B, hidden)."""
        return self._model.logits(hidden)

    def _next_positions(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Positions as in training (`positions_of` in data_pipeline/packed_text.py)."""
        positions, position = [], self.positions[row]
        for token in tokens:
            positions.append(position)
            position = 0 if token == self._restarts_after else position + 1
        self.positions[row] = position
        return positions

    @torch.no_grad()
    def append(self, other: "Decoder") -> None:
        """Append the texts of another decoder of this model.

        Raises states.NotBatchableError, and changes nothing, if the states cannot be batched.
        """
        self.states = other.states if self.states is None else states.concatenate(self.states, other.states)
        self.positions = [*self.positions, *other.positions]

    @torch.no_grad()
    def keep(self, texts: Sequence[int]) -> None:
        """Keep only these texts, in this order."""
        self.positions = [self.positions[text] for text in texts]
        self.states = states.select_rows(self.states, texts, max(self.positions, default=1) or 1)

    def extract(self, text: int, device: torch.device | str | None = None) -> "Decoder":
        """A copy of the decoder with one of its texts, and with its states on `device`; None: on that of the model."""
        one = copy(self)
        one.keep([text])
        one.states = states.on_device(one.states, self._device if device is None else device)
        return one
