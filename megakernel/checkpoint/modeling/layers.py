"""Norms, rotary positions, the MLP, and the base class of attention mechanisms."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .configuration import MegakernelConfig


def precise(x: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) if zero_centered."""

    def __init__(self, config: MegakernelConfig, width: int):
        super().__init__()
        self.eps, self.zero_centered = config.norm_eps, config.zero_centered_norm
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        """The factor 1."""
        init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., width) -> the same shape and dtype."""
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        weight = 1 + precise(self.weight)
        return F.rms_norm(precise(x), weight.shape, weight, self.eps).to(x.dtype)


def layer_norm(config: MegakernelConfig, exists: bool = True) -> nn.Module:
    """A norm of hidden states, or nothing in its place."""
    if exists and config.norm == "layernorm":
        return nn.LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config, config.hidden_size) if exists else nn.Identity()


class MLP(nn.Module):
    """down(act(gate x) * up x), or down(act(up x)) without a gate."""

    def __init__(self, config: MegakernelConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        tanh: Any = partial(F.gelu, approximate="tanh")
        self.act = {"swiglu": F.silu, "gelu": F.gelu}.get(config.activation, tanh)
        gated = config.activation in ("swiglu", "geglu_tanh")
        self.gate_proj = nn.Linear(hidden, inner, bias=bias) if gated else None
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, C) -> (B, N, C)."""
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


OPTIONAL: dict[str, Callable[..., Any]] = {}
"""What only some models have: short_convolution, learned and sinusoidal positions, kinds of rotary scaling."""


class Rotary:
    """Rotates pairs (x_j, x_{j + w/2}) of a head's first w channels by position * frequency_j."""

    def __init__(self, config: MegakernelConfig, base: float, scaling: dict[str, Any]):
        self.width, self.factor = int(config.head_dim * config.rotary_share), 1.0
        # On the CPU even under torch.device("meta"), and in float64: at position 10^6 a float32 angle is off by 0.06.
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64, device="cpu") / self.width
        self.frequencies = base**-exponents
        if (kind := scaling.get("kind", "none")) != "none":
            self.frequencies, self.factor = OPTIONAL[kind](self.width, base, scaling)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x (B, H, N, d) by positions (B, N), which may be fractional."""
        angles = positions[:, None, :, None] * self.frequencies.to(x.device)
        first, second = precise(x[..., : self.width]).chunk(2, -1)
        cos, sin = ((self.factor * wave).to(first.dtype) for wave in (angles.cos(), angles.sin()))
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return torch.cat([rotated, x[..., self.width :]], -1)


class Documents(NamedTuple):
    """Which tokens of a chunk see each other and the state before it, by their positions (B, L) in documents."""

    visible: Tensor  # (B, L, L) bool: a token sees itself and the earlier tokens of its document
    reads: Tensor  # (B, L) bool: the token's document began before the chunk, so it sees the state
    writes: Tensor  # (B, L) bool: the token's document is the last one of the chunk, so it enters the state
    keeps: Tensor  # (B,) bool: no document begins in the chunk, so the state stays

    @classmethod
    def of(cls, positions: Tensor) -> "Documents":
        """The documents of a chunk."""
        places = torch.arange(positions.shape[1], device=positions.device)
        start = places - positions  # negative if the document began before the chunk
        visible = (start[..., None] <= places) & (places <= places[:, None])
        return cls(visible, start < 0, start == start[:, -1:], start[:, -1] < 0)


class Attention(nn.Module):
    """Base class of the mechanisms, which are causal. A subclass implements the `kind` of config.attention."""

    kinds: ClassVar[dict[str, type["Attention"]]] = {}
    has_decay = has_strength = False  # whether the layer projects logits of a decay, and of a write strength

    def __init_subclass__(cls, kind: str):
        Attention.kinds[kind] = cls

    def __init__(self, config: MegakernelConfig, options: dict[str, Any], rotary: Rotary | None):
        super().__init__()
        self.num_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.key_heads, self.head_dim, self.rotary = self.kv_heads, config.head_dim, rotary

    def reset_parameters(self) -> None:
        """0, where a subclass has nothing else."""
        for parameter in self.parameters(recurse=False):
            init.zeros_(parameter)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, N, d), rotated if the layer has rotary positions."""
        return x if self.rotary is None else self.rotary(x, positions)

    def by_key_head(self, q: Tensor) -> Tensor:
        """Queries (B, H, N, d) as (B, H_kv, G, N, d), the G of each key head."""
        return q.unflatten(1, (self.kv_heads, -1))

    def forward(self, q, k, v, positions, state=None, decay=None, strength=None):
        """Output (B, H, N, d) and the state after the last token, for q (B, H, N, d), k and v (B, H_kv, N, d), not
        rotated, positions (B, N) in documents, the state before, and logits (B, H_kv, N) of decay and strength.
        """
