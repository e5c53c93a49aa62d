"""Local windows of blocks: a token's current block of its document, and optionally the blocks before it."""

from typing import NamedTuple

import torch
from torch import Tensor


class Tail(NamedTuple):
    """The last tokens read, (B, H_kv, T, d) each: unrotated keys, and values; zeros before the first token."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, count: int) -> "Tail":
        """The tail of `count` tokens before the first token."""
        return cls(*(x.new_zeros(*x.shape[:2], count, x.shape[3]) for x in (k, v)))


def window_visible(positions: Tensor, before: int, block_size: int, blocks: int) -> Tensor:
    """(B, L, before + L) bool: the keys that tokens at these positions (B, L) see, `before` of them earlier tokens."""
    reach = torch.minimum(positions, positions % block_size + (blocks - 1) * block_size)
    keys = torch.arange(before + positions.shape[1], device=positions.device)
    queries = keys[before:]
    return (keys <= queries[:, None]) & (keys >= (queries - reach)[..., None])


def window_positions(positions: Tensor, before: int) -> Tensor:
    """(B, before + L): positions of the `before` earlier tokens, as if they were of the same document, and of these."""
    earlier = positions[:, :1] - torch.arange(before, 0, -1, device=positions.device)
    return torch.cat([earlier, positions], 1)
