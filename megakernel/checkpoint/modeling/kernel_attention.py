"""Kernel attention: weights phi(q).phi(k), and sums over earlier keys as the state."""

from typing import Any

import torch

from .configuration import MegakernelConfig
from .features import FeatureMap
from .kernel_sums import KernelState, Sums, with_ones
from .layers import Attention, Documents, Rotary

KERNEL_CHUNK = 128  # tokens whose weights for each other are computed explicitly


class KernelAttention(Attention, kind="kernel"):
    """phi(q_i).sum phi(k_j) v_j / phi(q_i).sum phi(k_j) over the earlier tokens j of the document."""

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__(config, options, rotary)
        phi = options["feature_map"]
        self.projection = FeatureMap.classes[phi["name"]](config, phi)

    def forward(self, q, k, v, positions, state=None, decay=None, strength=None):
        """See Attention."""
        queries = self.by_key_head(self.rotated(q, positions)).split(KERNEL_CHUNK, 3)
        keys, values = (x.split(KERNEL_CHUNK, 2) for x in (self.rotated(k, positions), v))
        outputs = []
        for *chunk, at in zip(queries, keys, values, positions.split(KERNEL_CHUNK, 1)):
            phi_q, phi_k, ones = self.projection(chunk[0]), self.projection(chunk[1]), with_ones(chunk[2])
            state, documents = state or KernelState.empty(phi_k, ones), Documents.of(at)
            sums = Sums.of_pairs(phi_q, phi_k, ones, documents.visible)
            outputs.append(sums.plus(Sums.of_state(phi_q, state, documents.reads)).mean())
            state = state.next(phi_k, ones, documents.writes, documents.keeps)
        return torch.cat(outputs, 3).flatten(1, 2).to(v.dtype), state
