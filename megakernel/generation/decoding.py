"""Texts under way: the model's states behind their tokens."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import states

if TYPE_CHECKING:
    from megakernel.model import LanguageModel


class Decoder:
    """Reads tokens of one text or several into the model's recurrent states.

    Between calls it holds the states alone: a constant number of numbers for kernelized and windowed layers, the keys
    and values of all tokens for full softmax layers, padded in front to those of the longest text.
    """

    def __init__(self, model: "LanguageModel", eod: int, isolate_documents: bool, chunk_size: int = 512):
        """eod: the end-of-document token, behind which positions restart where documents are isolated.

        chunk_size: most tokens of one forward pass, which bounds the memory that a prompt takes.
        """
        self._model = model
        self._device = model.output_matrix.device
        self._restarts_after = eod if isolate_documents else None
        self._chunk_size = chunk_size
        self.positions = [0]
        """Of the next token of each text in its document."""

        self.states: list[Any] | None = None
        """One state for each layer; None before the first token."""

    @torch.inference_mode()
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Read as many tokens of each text, one or more; logits (B, V) of the tokens after the last."""
        length = len(tokens[0])
        for start in range(0, length, self._chunk_size):
            chunks = [row[start : start + self._chunk_size] for row in tokens]
            places = [self._places(row, chunk) for row, chunk in enumerate(chunks)]
            ids, positions = (torch.tensor(rows, device=self._device) for rows in (chunks, places))
            hidden, self.states = self._model.extend(ids, positions, self.states)
        return self._model.logits(hidden[-1:])[:, 0]

    def _places(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Positions as in training (data_pipeline.loader.cut)."""
        places, position = [], self.positions[row]
        for token in tokens:
            places.append(position)
            position = 0 if token == self._restarts_after else position + 1
        self.positions[row] = position
        return places

    @torch.no_grad()
    def join(self, other: "Decoder") -> None:
        """Take over the texts of another decoder of this model, behind the own ones.

        Raises states.Apart, with both as they were, where the states of their layers do not lie side by side.
        """
        self.states = other.states if self.states is None else states.join(self.states, other.states)
        self.positions = [*self.positions, *other.positions]

    @torch.no_grad()
    def keep(self, texts: Sequence[int]) -> None:
        """Forget all texts but these, in this order."""
        self.positions = [self.positions[text] for text in texts]
        self.states = states.rows(self.states, texts, max(self.positions, default=1) or 1)

    def alone(self, text: int) -> "Decoder":
        """A decoder of one of the texts, which stays here, too."""
        one = copy(self)
        one.keep([text])
        return one
