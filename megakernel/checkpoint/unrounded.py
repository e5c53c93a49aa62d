"""Weights that a half-precision run has frozen, as precise as it was given them."""

from collections.abc import Callable, Iterable
from functools import cached_property

import torch
from torch import Tensor

from megakernel.config import UserError

from .universal import STATE, WEIGHT, WholeTensors


class Unrounded:
    """A run's checkpoint (`WholeTensors`) in which weights that were never trained are those that the run began with.

    DeepSpeed keeps float32 masters of trained weights alone: the checkpoint has the others as the model computed with
    them, rounded to its dtype.
    """

    def __init__(self, checkpoint: WholeTensors, origin: Callable[[], WholeTensors]):
        """origin: finds what the run began with, under the same names; UserError where that is there no more."""
        self._checkpoint, self._find = checkpoint, origin

    @property
    def names(self) -> set[str]:
        """All parameters and buffers."""
        return self._checkpoint.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self._checkpoint.shape(name)

    def read(self, name: str, keys: Iterable[str] = STATE) -> dict[str, Tensor]:
        """Those of `keys` that are known of a tensor."""
        found = self._checkpoint.read(name, keys)
        weight = found.get(WEIGHT)
        if weight is None or weight.dtype == torch.float32 or self._origin is None:
            return found
        if name not in self._origin.names:
            return found
        exact = self._origin.read(name, [WEIGHT])[WEIGHT]
        # What lies there may be another by now. It is the same where it rounds to what the run computed with.
        if exact.shape == weight.shape and exact.to(weight.dtype).equal(weight):
            found[WEIGHT] = exact
        return found

    @cached_property
    def _origin(self) -> WholeTensors | None:
        try:
            return self._find()
        except UserError:
            return None
