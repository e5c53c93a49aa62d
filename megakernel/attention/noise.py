"""Random numbers held by layers, and when they are redrawn."""

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from megakernel.attention.layer import FullPrecision


class Redrawn(Protocol):
    """A module with a state that depends on the training step and not on the optimizer."""

    def redraw(self, step: int) -> None:
        """Set the state of `step`, counted from 0; a function of the step, the same on all ranks."""
        ...


def redraw(model: nn.Module, step: int) -> None:
    """Redraw all modules for `step`. Evaluation never calls it, so modules keep their last state."""
    for module in model.modules():
        if _is_redrawn(module):
            module.redraw(step)


def _is_redrawn(module: nn.Module | Redrawn) -> TypeGuard[Redrawn]:
    # `isinstance` with a protocol takes ten times as long, during which the GPU waits in every step.
    return hasattr(type(module), "redraw")


class Noise(FullPrecision):
    """A numbered draw of random numbers in a persistent buffer, returned by a call without arguments."""

    values: Tensor

    def __init__(self, draw: Callable[[int], Tensor], interval: int = 0):
        """draw: number -> tensor, a deterministic function; draw 0 comes first.

        interval: training steps between two draws; 0: never redraw.
        """
        super().__init__()
        self.draw = draw
        self.interval = interval
        self.draw_number = 0
        values = draw(0)
        if values.is_floating_point():
            values = values.float()
        self.register_buffer("values", values.to(torch.get_default_device()))

    def redraw(self, step: int) -> None:
        """Hold draw step // interval."""
        number = step // self.interval if self.interval else 0
        if number != self.draw_number:
            self.use_draw(number)

    def use_draw(self, number: int) -> None:
        """Hold another draw; training never uses negative numbers."""
        self.values.copy_(self.draw(number))
        self.draw_number = number

    def forward(self) -> Tensor:
        """The current draw."""
        return self.values
