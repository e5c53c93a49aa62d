"""A text under way: the model's state behind its tokens, and the logits of the next one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megakernel.model import LanguageModel


class Decoder:
    """Reads tokens into the model's recurrent state.

    Between calls it holds the state alone: a constant number of numbers for kernelized and windowed layers, the keys
    and values of all tokens for full softmax layers.
    """

    def __init__(self, model: LanguageModel, eod: int, isolate_documents: bool, chunk_size: int = 512):
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
