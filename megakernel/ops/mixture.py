"""Mixture keys: M keys per position with priors pi (Transformer-MGK, sections 2.3 and 2.4).

Inside the ops dimension 2 is always tokens, so the keys of a position are packed into one vector: (B, H_kv, N, M d).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megakernel.ops.arguments import check_priors, check_shift


class Rotation(Protocol):
    """A rotation of vectors by their positions."""

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, N, d) rotated at positions (B, N)."""
        ...

    def relative_to_last(self, x: Tensor) -> Tensor:
        """Keys x (B, H, n, d) of the last n tokens, rotated relative to the last token."""
        ...

    def at_start(self, x: Tensor) -> Tensor:
        """x (B, H, N, d) rotated by no position, for products at the scale of those of rotated vectors."""
        ...


def pack_keys(k: Tensor) -> Tensor:
    """Keys (B, H_kv, M, N, d) as (B, H_kv, N, M d); keys (B, H_kv, N, d) unchanged."""
    return k if k.dim() == 4 else k.movedim(2, 3).flatten(3)


def unpack_keys(k: Tensor, width: int) -> Tensor:
    """The inverse of `pack_keys`: (B, H_kv, N, M width) as (B, H_kv, M, N, width), also for M = 1."""
    return k.unflatten(-1, (-1, width)).movedim(3, 2)


def shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    """Keys k_r = x + b_r (B, H_kv, ..., M d) from x (B, H_kv, ..., d) and shifts b (H_kv, M, d); x itself for None."""
    if shift is None:
        return x
    shift = shift.to(x.dtype).view(len(shift), *[1] * (x.dim() - 3), *shift.shape[1:])
    return (x[..., None, :] + shift).flatten(-2)


def first_key(k: Tensor, priors: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """(B, H_kv, N, d) for checks of shapes: k itself, or the first of mixture keys k (B, H_kv, M, N, d).

    Raises:
        ValueError: priors, shifts and keys do not match.
    """
    if shift is not None:
        check_shift(shift, priors, k)
    if priors is None or shift is not None:
        return k
    check_priors(priors, k)
    return k[:, :, 0]


@dataclass(frozen=True)
class PackedRotary:
    """A rotation of packed keys x (B, H, N, M width) that applies `rotary` to each of the M keys."""

    rotary: Rotation
    width: int

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x rotated at positions (B, N)."""
        if x.shape[-1] == self.width:
            return self.rotary(x, positions)
        keys = unpack_keys(x, self.width)
        return pack_keys(self.rotary(keys.flatten(1, 2), positions).unflatten(1, keys.shape[1:3]))

    def relative_to_last(self, x: Tensor) -> Tensor:
        """Keys x (B, H, n, M width) of the last n tokens, rotated relative to the last token."""
        if x.shape[-1] == self.width:
            return self.rotary.relative_to_last(x)
        keys = unpack_keys(x, self.width)
        return pack_keys(self.rotary.relative_to_last(keys.flatten(1, 2)).unflatten(1, keys.shape[1:3]))

    def at_start(self, x: Tensor) -> Tensor:
        """x (B, H, N, M width), rotated by no position."""
        return self(x, torch.zeros(1, x.shape[2], device=x.device, dtype=torch.int64))


def packed_rotary(rotary: Rotation | None, width: int) -> Rotation | None:
    """`rotary` for packed keys (B, H, N, M width), or None."""
    return None if rotary is None else PackedRotary(rotary, width)


def by_component(keys: Tensor, priors: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Keys (B, H, N, M width) as (M, B, H, N, width), and priors (H_kv, M) as (M, H, 1, 1), H a multiple of H_kv."""
    components = torch.stack(keys.split(width, -1))
    if priors is None:
        return components, keys.new_ones(1, keys.shape[1], 1, 1)
    shares = priors.to(keys.dtype).repeat_interleave(keys.shape[1] // len(priors), 0)
    return components, shares.T[:, :, None, None]


def unpack_components(keys: Tensor, visible: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    """The M keys of each of W positions as M W keys, for similarities without a feature map that would sum them.

    keys: (B, H_kv, C, W, M d); visible: (B, 1, C, L, W) bool; priors: (H_kv, M). Returns keys (B, H_kv, C, M W, d),
    component by component, and their visibility (B, H_kv, C, L, M W), False for keys of prior 0.
    """
    components = torch.cat(keys.chunk(priors.shape[-1], -1), 3)
    return components, (visible[..., None, :] & (priors > 0)[:, None, None, :, None]).flatten(4)


def merged_components(weights: Tensor, priors: Tensor) -> Tensor:
    """sum_r pi_r w_r per position (B, H_kv, C, R, W) from weights per key (B, H_kv, C, R, M W)."""
    shares = priors.to(weights.dtype)[:, None, None, :, None]
    return (weights.unflatten(-1, (priors.shape[-1], -1)) * shares).sum(-2)
