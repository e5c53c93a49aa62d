"""Softmax attention, over the whole document or a sliding window."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .configuration import MegakernelConfig
from .layers import Attention, Rotary, precise

QUERIES = 512  # queries whose scores exist at once


class KeyValueState(NamedTuple):
    """The rotated keys and the values that later tokens can see, (B, H_kv, T, d) each."""

    keys: Tensor
    values: Tensor


class SoftmaxAttention(Attention, kind="softmax"):
    """softmax(q.k / sqrt(d)) over the document or its last `window` tokens; a `softcap` c makes it c tanh(q.k / c)."""

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__(config, options, rotary)
        self.window, self.softcap = options.get("window"), options.get("softcap")

    def forward(self, q, k, v, positions, state=None, decay=None, strength=None):
        """See Attention."""
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        if state is not None:
            k, v = (torch.cat([before.to(x.dtype), x], 2) for before, x in zip(state, (k, v)))
        before, outputs = k.shape[2] - q.shape[2], []
        reach = positions if self.window is None else positions.clamp(max=self.window - 1)
        for start in range(0, q.shape[2], QUERIES):
            stop = min(start + QUERIES, q.shape[2])
            first = 0 if self.window is None else max(before + start - self.window + 1, 0)
            places = torch.arange(first, before + stop, device=q.device)
            last = torch.arange(before + start, before + stop, device=q.device)
            visible = (places <= last[:, None]) & (places >= (last - reach[:, start:stop])[..., None])
            keys, values = (x[:, :, first : before + stop] for x in (k, v))
            outputs.append(self.attend(q[:, :, start:stop], keys, values, visible[:, None]))
        kept = 0 if self.window is None else max(k.shape[2] - self.window + 1, 0)
        return torch.cat(outputs, 2), KeyValueState(k[:, :, kept:], v[:, :, kept:])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Weighted means (B, H, L, d) of the values that are visible, (B, 1, L, T) bool."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        queries, keys = precise(self.by_key_head(q)), precise(k)[:, :, None]
        scores = queries @ keys.mT * self.head_dim**-0.5
        scores = self.softcap * (scores / self.softcap).tanh()
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        return (weights @ precise(v)[:, :, None]).flatten(1, 2).to(v.dtype)
