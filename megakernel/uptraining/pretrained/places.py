"""Where the tokens of a batch stand in their texts, from what `transformers` hands over: ids and a mask."""

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where each row stands behind the tokens read so far."""

    following: Tensor
    """(B,) int64: position of the next token."""

    begun: Tensor
    """(B,) bool: the row has had a token of text."""

    ended: Tensor
    """(B,) bool: and padding after it."""

    @classmethod
    def start(cls, tokens: Tensor) -> "Places":
        """Before the first token of rows (B, N)."""
        nothing = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        return cls(nothing.long(), nothing, nothing)


def read_on(
    tokens: Tensor, mask: Tensor | None, before: Places, restarts_after: int | None
) -> tuple[Tensor, Places]:
    """Positions (B, N) of tokens (B, N) that follow `before`, and where the rows then stand.

    Position 0 starts a text, which sees nothing of what lies before it. So every padding token is made a text of its
    own, and the text behind padding on the left begins at 0: no layer has to know of padding.

    Args:
        tokens: ids.
        mask: (B, N) 1 for text and 0 for padding; None: all are text.
        before: where the rows stand.
        restarts_after: the id that ends a document, where training keeps documents apart.

    Raises:
        ValueError: a text goes on behind padding, which would be another text to the layers.
    """
    real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    begun = before.begun[:, None] | (real.cumsum(1) > 0)
    ended = before.ended[:, None] | ((begun & ~real).cumsum(1) > 0)
    if mask is not None and bool((ended & real).any()):
        raise ValueError(
            "attention_mask has padding inside a text; pad on the left (tokenizer.padding_side = 'left')"
        )
    ends = ~real if restarts_after is None else ~real | (tokens == restarts_after)
    starts = ~real
    starts[:, 1:] |= ends[:, :-1]
    places = torch.arange(tokens.shape[1], device=tokens.device)
    last_start = torch.where(starts, places, -1).cummax(1).values
    positions = torch.where(last_start < 0, before.following[:, None] + places, places - last_start)
    following = (positions[:, -1] + 1).masked_fill(ends[:, -1], 0)
    return positions, Places(following, begun[:, -1], ended[:, -1])
