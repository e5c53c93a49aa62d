"""Random numbers that a layer holds: where they come from and when they change."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megakernel.attention.layer import FullPrecision


@runtime_checkable
class Redrawn(Protocol):
    """A module that changes with the training step besides what the optimizer does."""

    def redraw(self, step: int) -> None:
        """Hold what `step`, counted from 0, is trained with: a function of the step, the same on all ranks."""
        ...


def redraw(model: nn.Module, step: int) -> None:
    """Tell all modules that `step` begins. Evaluation never calls it: what is held stays."""
    for module in model.modules():
        if isinstance(module, Redrawn):
            module.redraw(step)


class Noise(FullPrecision):
    """One of a sequence of draws, in a buffer of the checkpoint; called without arguments."""

    values: Tensor

    def __init__(self, draw: Callable[[int], Tensor], interval: int = 0):
        """draw: number -> tensor, a function of the number alone; draw 0 is held first.

        interval: training steps between two draws, 0 for none.
        """
        super().__init__()
        self.draw = draw
        self.interval = interval
        self.held = 0
        values = draw(0)
        if values.is_floating_point():
            values = values.float()
        self.register_buffer("values", values.to(torch.get_default_device()))

    def redraw(self, step: int) -> None:
        """Hold draw step // interval."""
        number = step // self.interval if self.interval else 0
        if number != self.held:
            self.hold(number)

    def hold(self, number: int) -> None:
        """Hold another draw; training never takes one with a negative number."""
        self.values.copy_(self.draw(number))
        self.held = number

    def forward(self) -> Tensor:
        """The draw that is held."""
        return self.values
