"""Feature maps phi, whose dot products weigh keys."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .configuration import MegakernelConfig
from .layers import precise


class Features(NamedTuple):
    """phi(x) = values * exp(log), with a scale that keeps exponentials finite."""

    values: Tensor  # (..., L, F)
    log: Tensor  # (..., L)


class FeatureMap(nn.Module):
    """phi of queries and keys; the subclass for a name has `mapped`, from x to values and their log scale."""

    mapped: Callable[[Tensor], tuple[Tensor, Tensor]]
    classes: ClassVar[dict[str, type["FeatureMap"]]] = {}

    def __init_subclass__(cls, names: tuple[str, ...]):
        FeatureMap.classes |= dict.fromkeys(names, cls)

    def __init__(self, config: MegakernelConfig, options: dict[str, Any]):
        super().__init__()
        self.name, self.smoothing = options["name"], options["smoothing"]

    def forward(self, x: Tensor) -> Features:
        """phi of x (B, H_kv, L, d) or (B, H_kv, G, L, d), in float32 or better."""
        values, log = self.mapped(precise(x))
        if self.smoothing:  # one more feature, the same for every token
            larger = log.clamp(min=math.log(self.smoothing))
            constant = self.smoothing * (-larger).exp()
            values, log = (
                torch.cat([values * (log - larger).exp()[..., None], constant[..., None]], -1),
                larger,
            )
        return Features(values, log)

    @staticmethod
    def projected(x: Tensor, matrix: Tensor) -> Tensor:
        """x times each key head's matrix (H_kv, M, d), transposed."""
        matrix = matrix.to(x.dtype).mT
        return x @ (matrix[:, None] if x.dim() == 5 else matrix)
