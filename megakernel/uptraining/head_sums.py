"""Numbers of heads: their means over micro-batches and processes, and the tags of a transfer's scalars."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HeadTag(NamedTuple):
    """What is measured of which head."""

    name: str
    layer: int
    head: int

    def __str__(self) -> str:
        return f"transfer/{self.name}/layer_{self.layer}/head_{self.head}"

    @classmethod
    def parse(cls, tag: str) -> "HeadTag":
        """The reverse of `str`."""
        match = re.fullmatch(r"transfer/(.+)/layer_(\d+)/head_(\d+)", tag)
        assert match, tag
        return cls(match[1], int(match[2]), int(match[3]))


class Place(NamedTuple):
    """Whose number it is."""

    name: str
    layer: int
    first_head: int
    """Of the consecutive heads that a process holds."""


class HeadSums:
    """Sums of numbers of each head and what they are sums over.

    Parts add up: those of rows on other data ranks, of tokens on other context ranks, and beside them stand heads on
    other tensor ranks and layers on other stages.
    """

    def __init__(self) -> None:
        self._sums: dict[Place, Tensor] = {}

    def add(self, place: Place, sums: Tensor, counts: Tensor) -> None:
        """Sums (H,) over something of which (H,) or one `counts` says how much; nothing waits for the device."""
        both = torch.stack([sums.double(), counts.double().expand(sums.shape)])
        self._sums[place] = self._sums[place] + both if place in self._sums else both

    def means(self, gather: Callable[[Any], list[Any]]) -> dict[str, dict[int, Tensor]]:
        """Name -> layer -> (H,) of all heads, float64 on the CPU; nan where nothing was counted.

        gather: one value of every process -> those of all, such as `Mesh.gather_objects`.
        """
        whole: dict[Place, Tensor] = {}
        for part in gather({tuple(place): sums.cpu() for place, sums in self._sums.items()}):
            for key, sums in part.items():
                place = Place(*key)
                whole[place] = whole[place] + sums if place in whole else sums
        found: dict[str, dict[int, Tensor]] = {}
        for place in sorted(whole):
            sums, counts = whole[place]
            layers = found.setdefault(place.name, {})
            heads = [layers[place.layer]] if place.layer in layers else []
            layers[place.layer] = torch.cat([*heads, sums / counts])
        return found

    def clear(self) -> None:
        """Begin anew."""
        self._sums.clear()
