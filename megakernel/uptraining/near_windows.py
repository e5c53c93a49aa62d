"""Near windows shut less and less often, so that the far part learns from the start of up-training.

A window that is exact from the first step explains most of what a dense layer did, and leaves the far part little to
learn from.
"""

from dataclasses import dataclass

from torch import nn

from megakernel.attention.flurka import FlurkaAttention
from megakernel.config import UserError

from .layers import attention_cores


@dataclass(frozen=True)
class LinearDecay:
    """p(step) = start (1 - step / steps), and 0 from step `steps` on; steps count from 0."""

    start: float
    steps: int

    def __call__(self, step: int) -> float:
        """p of `step`."""
        return self.start * max(0.0, 1 - step / self.steps)


def drop_near_windows(model: nn.Module, schedule: LinearDecay, seed: int) -> None:
    """Let gated FLuRKA layers of a model shut the near windows of heads in training, as `schedule` says.

    What `Engine.redraw(step)` tells the model chooses the heads; evaluation shuts none.

    Raises:
        UserError: this process holds FLuRKA layers and none has a gate.
    """
    cores = {
        index: core for index, core in attention_cores(model).items() if isinstance(core, FlurkaAttention)
    }
    gated = {index: core for index, core in cores.items() if core.is_gated}
    if cores and not gated:
        raise UserError(
            "near dropout shuts gates, and model.attention has none; take near: {kind: softmax, join: gated} "
            "or leave it out"
        )
    for index, core in gated.items():
        core.drop_near(schedule, (seed, index))
