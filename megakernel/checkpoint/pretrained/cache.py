"""The recurrent state of a model as the cache of `generate`, and where tokens stand in their texts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache


class Places(NamedTuple):
    """Where each sequence stands behind the tokens read so far."""

    following: Tensor
    """(B,) int64: position of the next token, if it goes on with the text of the last one."""

    restarts: Tensor
    """(B,) bool: the last token ended its document."""

    begun: Tensor
    """(B,) bool: the sequence has had a token of text."""

    ended: Tensor
    """(B,) bool: and padding after it."""

    @classmethod
    def start(cls, tokens: Tensor) -> "Places":
        """Before the first token of sequences (B, N)."""
        nothing = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return cls(nothing.long(), nothing, nothing, nothing)


def read_on(
    tokens: Tensor,
    mask: Tensor | None,
    before: Places,
    restarts_after: int | None,
    given: Tensor | None = None,
) -> tuple[Tensor, Places]:
    """Positions (B, N) of tokens (B, N) that follow `before`, and where the sequences then stand.

    Position 0 starts a text, which sees nothing of what lies before it. So every padding token is made a text of its
    own, and the text behind padding on the left begins at 0: no layer has to know of padding.

    Args:
        tokens: ids.
        mask: (B, N) 1 for text and 0 for padding; None: all are text.
        before: where the sequences stand.
        restarts_after: the id that ends a document, where training keeps documents apart.
        given: (B, N) or (1, N) positions that somebody else made, and which then say where texts begin; those of
            padding are not looked at.

    Raises:
        ValueError: a text goes on behind padding, which would be another text to the layers, or given positions
            neither go on nor begin at 0.
    """
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    begun = before.begun[:, None] | (real.cumsum(1) > 0)
    ended = before.ended[:, None] | ((begun & ~real).cumsum(1) > 0)
    if mask is not None and bool((ended & real).any()):
        raise ValueError(
            "attention_mask has padding inside a text; pad on the left (tokenizer.padding_side = 'left')"
        )
    ends = torch.zeros_like(real) if restarts_after is None else tokens == restarts_after
    if given is None:
        starts = ~real
        starts[:, 0] |= before.restarts
        starts[:, 1:] |= (ends | ~real)[:, :-1]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        last_start = torch.where(starts, places, -1).cummax(1).values
        positions = torch.where(last_start < 0, before.following[:, None] + places, places - last_start)
    else:
        positions = _checked(given, tokens, real, before)
    following = (positions[:, -1] + 1).where(real[:, -1], 0)
    return positions, Places(following, ends[:, -1], begun[:, -1], ended[:, -1])


def _checked(given: Tensor, tokens: Tensor, real: Tensor, before: Places) -> Tensor:
    rows, count = tokens.shape
    if given.dim() != 2 or given.shape[0] not in (1, rows) or given.shape[1] != count:
        raise ValueError(f"position_ids has shape {tuple(given.shape)}; give ({rows}, {count})")
    positions = given.expand(rows, -1).long().where(real, 0)
    expected = torch.cat([before.following[:, None], (positions + 1).where(real, 0)[:, :-1]], 1)
    wrong = real & (positions != 0) & (positions != expected)
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {place}] is {int(positions[row, place])}; give {int(expected[row, place])}, where "
            "the text goes on, or 0, where one begins (or leave position_ids out)"
        )
    return positions


class StateCache(Cache):
    """What the layers keep of the tokens read so far.

    Its size does not grow with them, but for layers of full softmax or pairwise attention. All tensors have the
    sequences of the batch first. It cannot forget tokens that it has read.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[Any] | None = None
        """One state per layer; None before the first token."""

        self.places: Places | None = None
        self.tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included."""
        return self.tokens

    @property
    def batch_size(self) -> int:
        """Sequences; -1 before the first token."""
        return -1 if self.places is None else len(self.places.following)

    @property
    def is_initialized(self) -> bool:
        """Whether tokens have been read."""
        return self.states is not None

    @property
    def is_croppable(self) -> bool:
        """No."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused but for 0 tokens."""
        if tokens_to_remove:
            raise ValueError(
                "a recurrent state cannot forget tokens; decode without an assistant model or prompt lookup"
            )

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.places, self.tokens = None, None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order."""
        self._map(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, 0))

    def _map(self, function: Any) -> None:
        kept = (self.states, self.places)
        self.states, self.places = pytree.tree_map_only(torch.Tensor, function, kept)
