"""The recurrent state of a model as the cache of `generate`, and the positions of tokens in their documents."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache


class Places(NamedTuple):
    """Position of each sequence after the tokens read so far."""

    following: Tensor
    """(B,) int64: position of the next token, if it continues the document of the last one."""

    restarts: Tensor
    """(B,) bool: the last token ended its document."""

    begun: Tensor
    """(B,) bool: the sequence has had a token other than padding."""

    ended: Tensor
    """(B,) bool: padding has followed that."""

    @classmethod
    def start(cls, tokens: Tensor) -> "Places":
        """Before the first token of sequences (B, N)."""
        nothing = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return cls(nothing.long(), nothing, nothing, nothing)


def next_positions(
    tokens: Tensor,
    mask: Tensor | None,
    before: Places,
    restarts_after: int | None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Places]:
    """Positions (B, N) of tokens (B, N) that follow `before`, and the places after them.

    Position 0 starts a document, which does not attend to anything before it. So each padding token becomes a document
    of its own, and the text after left padding starts at 0: layers need no padding mask.

    Args:
        tokens: ids.
        mask: (B, N) 1 for text and 0 for padding; None: no padding.
        before: the places before the tokens.
        restarts_after: the id that ends a document, if training isolates documents.
        position_ids: (B, N) or (1, N) positions from the caller, which then determine where documents start; those
            of padding are ignored.

    Raises:
        ValueError: padding inside a text, which would split it into two documents, or position_ids that neither
            continue nor start at 0.
    """
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    begun = before.begun[:, None] | (real.cumsum(1) > 0)
    ended = before.ended[:, None] | ((begun & ~real).cumsum(1) > 0)
    if mask is not None and bool((ended & real).any()):
        raise ValueError(
            "attention_mask has padding inside a text; pad on the left (tokenizer.padding_side = 'left')"
        )
    ends = torch.zeros_like(real) if restarts_after is None else tokens == restarts_after
    if position_ids is None:
        starts = ~real
        starts[:, 0] |= before.restarts
        starts[:, 1:] |= (ends | ~real)[:, :-1]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        last_start = torch.where(starts, places, -1).cummax(1).values
        positions = torch.where(last_start < 0, before.following[:, None] + places, places - last_start)
    else:
        positions = _check_positions(position_ids, tokens, real, before)
    following = (positions[:, -1] + 1).where(real[:, -1], 0)
    return positions, Places(following, ends[:, -1], begun[:, -1], ended[:, -1])


def _check_positions(position_ids: Tensor, tokens: Tensor, real: Tensor, before: Places) -> Tensor:
    rows, count = tokens.shape
    if position_ids.dim() != 2 or position_ids.shape[0] not in (1, rows) or position_ids.shape[1] != count:
        raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; give ({rows}, {count})")
    positions = position_ids.expand(rows, -1).long().where(real, 0)
    expected = torch.cat([before.following[:, None], (positions + 1).where(real, 0)[:, :-1]], 1)
    wrong = real & (positions != 0) & (positions != expected)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {place}] is {int(positions[row, place])}; give {int(expected[row, place])} to "
            "continue the text, or 0 to begin one (or leave position_ids out)"
        )
    return positions


class StateCache(Cache):
    """The layers' states after the tokens read so far.

    Its size is independent of their number, except for layers of full softmax or pairwise attention. The first
    dimension of all tensors is the batch. It cannot be cropped.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[Any] | None = None
        """One state per layer; None before the first token."""

        self.places: Places | None = None
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read, with padding."""
        return self.tokens

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first token."""
        return -1 if self.places is None else len(self.places.following)

    @property
    def is_initialized(self) -> bool:
        """Whether tokens have been read."""
        return self.states is not None

    @property
    def is_croppable(self) -> bool:
        """False: a recurrent state cannot forget tokens."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError unless tokens_to_remove is 0."""
        if tokens_to_remove:
            raise ValueError(
                "a recurrent state cannot forget tokens; decode without an assistant model or prompt lookup"
            )

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.places, self.tokens = None, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i with sequence beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def _map(self, function: Any) -> None:
        kept = (self.states, self.places)
        self.states, self.places = pytree.tree_map_only(torch.Tensor, function, kept)
