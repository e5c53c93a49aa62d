"""What a FLuRKA layer is, what it learns and what it carries."""

from typing import Literal, NamedTuple

from torch import Tensor

from megakernel.ops.state import KernelState
from megakernel.ops.window import Rotary, Tail


class Form(NamedTuple):
    """The fixed answers of a layer (MECHANISMS section 4)."""

    feature_map: str
    block_size: int
    blocks: Literal[1, 2]
    near: Literal["softmax", "kernel"]
    rotary: Rotary | None
    far_rope: Literal["none", "centroid"]

    @property
    def near_rotary(self) -> Rotary | None:
        """Rotation of the near part: a softmax always, a kernel only together with the far part, whose phi(q) it uses."""
        return self.rotary if self.near == "softmax" else self.far_rotary

    @property
    def far_rotary(self) -> Rotary | None:
        """Rotation of far queries and landmarks."""
        return self.rotary if self.far_rope == "centroid" else None


class Weights(NamedTuple):
    """The learned tensors of a layer."""

    projection: Tensor | None
    pool_keys: Tensor
    pool_values: Tensor
    far_mass: Tensor | None
    far_weight: Tensor | None


class FlurkaState(NamedTuple):
    """What a sequence carries from piece to piece: constant in the number of tokens."""

    far: KernelState
    """The landmarks of blocks that every later token of the open document sees."""

    tail: Tail
    """The last b * blocks tokens."""
