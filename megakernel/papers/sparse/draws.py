"""Random integers for every token or block of sequences of any length, without a table of them."""

import torch
from torch import Tensor

from megakernel.attention.heads import LayerSettings, generator
from megakernel.attention.noise import Noise

_LOW = 2**32 - 1
_MIX = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and odd factors of a mixing function of 32 bits (Wellons's lowbias32)."""


class Draws(Noise):
    """Uniform integers below 2^31, a function of (seed, head, draw, indices).

    The buffer has one random number per query head, which is mixed with the indices. So a sequence of any length has
    its numbers, the first ones are those of a shorter sequence, and no numbers are sent to a device.
    """

    def __init__(self, settings: LayerSettings, label: str, interval: int = 0):
        """label: distinguishes the layer's draws. interval: training steps between two draws; 0: one for the run."""

        def draw(number: int) -> Tensor:
            streams = (generator(settings.seed, head, number, label) for head in settings.query_heads)
            return torch.cat([torch.randint(2**32, (1,), generator=s, device="cpu") for s in streams])

        super().__init__(draw, interval)

    def at(self, rows: Tensor, columns: int, heads: slice = slice(None)) -> Tensor:
        """Numbers (H, n, columns) of `heads` for the indices `rows` (n,)."""
        of_row = mixed(self()[heads, None] + mixed(rows + 1))
        return mixed(of_row[..., None] + mixed(torch.arange(1, columns + 1, device=rows.device))) >> 1


def mixed(x: Tensor) -> Tensor:
    """The 32 low bits of int64 `x`, mixed: equal numbers stay equal, and neighbors become unrelated."""
    x = x & _LOW
    for shift, factor in _MIX:
        x = ((x ^ (x >> shift)) * factor) & _LOW
    return x ^ (x >> 16)
