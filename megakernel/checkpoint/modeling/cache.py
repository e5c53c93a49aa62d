"""The cache of `generate`, and the positions of tokens in their documents."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import Cache


class Places(NamedTuple):
    """Where each of B sequences stands after the tokens read so far."""

    following: Tensor  # (B,) position of the next token, if it continues the document of the last one
    restarts: Tensor  # (B,) bool: the last token ended its document
    begun: Tensor  # (B,) bool: the sequence has had a token other than padding
    ended: Tensor  # (B,) bool: padding has followed that


def next_positions(
    ends: Tensor, mask: Tensor | None, before: Places | None, position_ids: Tensor | None
) -> tuple[Tensor, Places]:
    """Positions (B, N) of tokens in their documents, and the places after them. ends: (B, N), who ends a document.

    Position 0 starts a document, which does not attend to anything before it. So each padding token becomes a document
    of its own, and the text after left padding starts at 0: layers need no padding mask.
    """
    rows, count = ends.shape
    if mask is not None and (mask.dim() != 2 or len(mask) != rows or mask.shape[1] < count):
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; give ({rows}, {count})")
    real = torch.ones_like(ends) if mask is None else mask[:, -count:].bool()
    if before is None:
        none = torch.zeros_like(ends[:, 0])
        before = Places(none.long(), none, none, none)
    begun = before.begun[:, None] | (real.cumsum(1) > 0)
    ended = before.ended[:, None] | ((begun & ~real).cumsum(1) > 0)
    if mask is not None and bool((ended & real).any()):
        raise ValueError("attention_mask has padding inside a text; pad on the left")
    if position_ids is None:
        starts = ~real
        starts[:, 0] |= before.restarts
        starts[:, 1:] |= (ends | ~real)[:, :-1]
        places = torch.arange(count, device=ends.device)
        last_start = torch.where(starts, places, -1).cummax(1).values
        positions = torch.where(last_start < 0, before.following[:, None] + places, places - last_start)
    elif position_ids.dim() != 2 or len(position_ids) not in (1, rows) or position_ids.shape[1] != count:
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; give ({rows}, {count})")
    else:
        positions = position_ids.expand(rows, -1).long().where(real, 0)
        expected = torch.cat([before.following[:, None], (positions + 1).where(real, 0)[:, :-1]], 1)
        wrong = (real & (positions != 0) & (positions != expected)).nonzero().tolist()
        for row, place in wrong[:1]:
            found, next_one = int(positions[row, place]), int(expected[row, place])
            raise ValueError(
                f"position_ids[{row}, {place}] is {found}; give {next_one} to continue the text, or 0 to begin one"
            )
    following = (positions[:, -1] + 1).where(real[:, -1], 0)
    return positions, Places(following, ends[:, -1], begun[:, -1], ended[:, -1])


class StateCache(Cache):
    """The layers' states after the tokens read so far; their size is constant, except in layers of full softmax."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.states: list[Any] | None = None  # one state per layer; None before the first token
        self.places: Places | None = None
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read, with padding."""
        return self.tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless tokens_to_remove is 0."""
        if tokens_to_remove:
            raise ValueError("a recurrent state cannot forget tokens; decode without an assistant model")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i with sequence beam_idx[i]: the batch is the first dimension of all tensors."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        self.states, self.places = tree_map_only(torch.Tensor, function, (self.states, self.places))
