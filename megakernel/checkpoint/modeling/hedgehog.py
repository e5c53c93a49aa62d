"""The learned feature map hedgehog."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .configuration import MegakernelConfig
from .features import FeatureMap


class Hedgehog(FeatureMap, names=("hedgehog",)):
    """[softmax(W x), softmax(-W x)] with a learned W per key head."""

    def __init__(self, config: MegakernelConfig, options: dict[str, Any]):
        super().__init__(config, options)
        self.matrix = nn.Parameter(torch.empty(config.num_key_value_heads, config.head_dim, config.head_dim))

    def reset_parameters(self) -> None:
        """W = I."""
        init.copy_(self.matrix, torch.eye(self.matrix.shape[-1]))

    def mapped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See FeatureMap."""
        y = self.projected(x, self.matrix)
        return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1), x.new_zeros(x.shape[:-1])
