"""Weights and optimizer state by the names of whole tensors, independent of files and layouts."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn

from megakernel.parallel.partition import Partition

from .fragments import WHOLE, Fragment


def partitions(model: nn.Module) -> dict[str, Partition]:
    """Name -> partition of every parameter and buffer that a checkpoint holds.

    Call it before deepspeed.initialize: casting replaces buffers, which lose their attributes.
    """
    tensors = model.state_dict(keep_vars=True)  # Megatron-core's layers add extra state that is no tensor
    return {name: Partition.of(tensor) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
MUON = "muon"
"""Key of a parameter group: whether Muon updates it, whose state is only the first of MOMENTS."""

STEP = "step"
STATE = (WEIGHT, *MOMENTS, STEP)
"""State of a tensor: its value, AdamW's moments, and its number of updates."""


class WholeTensors(Protocol):
    """A checkpoint as whole tensors, of which fragments are read."""

    @property
    def names(self) -> set[str]:
        """Names of all parameters and buffers."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self.read(name, [WEIGHT])[WEIGHT].shape)

    def read(self, name: str, keys: Iterable[str] = STATE, fragment: Fragment = WHOLE) -> dict[str, Tensor]:
        """Return the available `keys` of a tensor, a fragment of each but STEP."""
