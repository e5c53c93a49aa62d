"""Local attention: softmax over a window of blocks."""

from typing import Any

import torch
import torch.nn.functional as F

from .blocks import Tail, window_positions, window_visible
from .configuration import MegakernelConfig
from .layers import Attention, Rotary

LOCAL_CHUNK = 256  # tokens whose windows are computed at once


class LocalAttention(Attention, kind="local"):
    """softmax(q.k / sqrt(d)) over a token's current block and the `blocks` - 1 blocks before it."""

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__(config, options, rotary)
        self.block_size, self.blocks = options["near"]["block_size"], options["near"]["blocks"]

    def forward(self, q, k, v, positions, state=None, decay=None, strength=None):
        """See Attention."""
        count = self.block_size * self.blocks
        tail = Tail.empty(k, v, count) if state is None else state
        outputs = []
        chunks = zip(*(x.split(LOCAL_CHUNK, 2) for x in (q, k, v)), positions.split(LOCAL_CHUNK, 1))
        for queries, new_keys, new_values, at in chunks:
            keys = torch.cat([tail.keys.to(k.dtype), new_keys], 2)
            values = torch.cat([tail.values.to(v.dtype), new_values], 2)
            visible = window_visible(at, count, self.block_size, self.blocks)[:, None]
            near = self.rotated(queries, at), self.rotated(keys, window_positions(at, count)), values
            outputs.append(F.scaled_dot_product_attention(*near, attn_mask=visible, enable_gqa=True))
            tail = Tail(keys[:, :, -count:], values[:, :, -count:])
        return torch.cat(outputs, 2), tail
