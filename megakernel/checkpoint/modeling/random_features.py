"""Feature maps with random frequencies: favor (positive, of the Performer) and rff (cosines and sines)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration import MegakernelConfig
from .features import FeatureMap


class Frequencies(nn.Module):
    """Random frequencies omega (H_kv, M, d), which are not learned and stay in float32 when the model is cast."""

    def __init__(self, config: MegakernelConfig, samples: int):
        super().__init__()
        shape = (config.num_key_value_heads, samples, config.head_dim)
        self.values: Any
        self.register_buffer("values", torch.empty(shape, dtype=torch.float32))

    def reset_parameters(self) -> None:
        """New frequencies."""
        init.normal_(self.values)

    def _apply(self, fn, recurse=True):
        return super()._apply(lambda x: x.to(fn(x).device) if fn(x).dtype.itemsize < 4 else fn(x), recurse)


class RandomFeatures(FeatureMap, names=("favor", "rff")):
    """exp(omega.x - |x|^2 / 2) or [cos(omega.x), sin(omega.x)], both / sqrt(M), of x / d^(1/4)."""

    def __init__(self, config: MegakernelConfig, options: dict[str, Any]):
        super().__init__(config, options)
        samples = options.get("samples") or config.head_dim * (2 if self.name == "favor" else 1)
        self.matrix: Any = Frequencies(config, samples)

    def mapped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See FeatureMap."""
        x = x * x.shape[-1] ** -0.25
        y = self.projected(x, self.matrix.values)
        if self.name == "rff":
            return torch.cat([y.cos(), y.sin()], -1) * y.shape[-1] ** -0.5, x.new_zeros(x.shape[:-1])
        y = y - x.square().sum(-1, keepdim=True) / 2
        log = y.detach().amax(-1)
        return (y - log[..., None]).exp() * y.shape[-1] ** -0.5, log
