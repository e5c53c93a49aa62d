"""Positions at which several keys stand, M of them with priors pi (Transformer-MGK, sections 2.3 and 2.4).

Inside the ops tokens are dimension 2 of everything that is cut, scanned or carried, so the keys of a position lie
beside each other: (B, H_kv, N, M d).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megakernel.ops.arguments import check_priors, check_shift


class Rotary(Protocol):
    """A rotation of vectors by their positions."""

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, H, N, d) rotated at positions (B, N)."""
        ...

    def behind(self, x: Tensor) -> Tensor:
        """Keys x (B, H, n, d) of the last n tokens, turned back by their distance to the last."""
        ...


def pack_keys(k: Tensor) -> Tensor:
    """Keys (B, H_kv, M, N, d) as (B, H_kv, N, M d); one key at a position, (B, H_kv, N, d), as it is."""
    return k if k.dim() == 4 else k.movedim(2, 3).flatten(3)


def separate(k: Tensor, width: int) -> Tensor:
    """The inverse of `pack_keys`, also for one key: (B, H_kv, N, M width) as (B, H_kv, M, N, width)."""
    return k.unflatten(-1, (-1, width)).movedim(3, 2)


def shifted(x: Tensor, shift: Tensor | None) -> Tensor:
    """Keys k_r = x + b_r, (B, H_kv, ..., M d), of x (B, H_kv, ..., d) and shifts b (H_kv, M, d); None leaves x."""
    if shift is None:
        return x
    each = shift.to(x.dtype).view(len(shift), *[1] * (x.dim() - 3), *shift.shape[1:])
    return (x[..., None, :] + each).flatten(-2)


def first_key(k: Tensor, priors: Tensor | None, shift: Tensor | None = None) -> Tensor:
    """(B, H_kv, N, d): k itself, or with priors (H_kv, M) and no shift the first of the keys k (B, H_kv, M, N, d).

    Raises:
        ValueError: priors, shifts and keys that do not fit.
    """
    if shift is not None:
        check_shift(shift, priors, k)
    if priors is None or shift is not None:
        return k
    check_priors(priors, k)
    return k[:, :, 0]


@dataclass(frozen=True)
class RotatedEach:
    """A rotation of x (B, H, N, M width) that turns each of the M keys as `rotary` turns one."""

    rotary: Rotary
    width: int

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` rotated at positions (B, N)."""
        if x.shape[-1] == self.width:
            return self.rotary(x, positions)
        keys = separate(x, self.width)
        return pack_keys(self.rotary(keys.flatten(1, 2), positions).unflatten(1, keys.shape[1:3]))

    def behind(self, x: Tensor) -> Tensor:
        """Keys x (B, H, n, M width) turned back by their distance to the last."""
        if x.shape[-1] == self.width:
            return self.rotary.behind(x)
        keys = separate(x, self.width)
        return pack_keys(self.rotary.behind(keys.flatten(1, 2)).unflatten(1, keys.shape[1:3]))


def rotated_each(rotary: Rotary | None, width: int) -> Rotary | None:
    """`rotary` for x (B, H, N, M width): it turns each of the M keys as it would turn one."""
    return None if rotary is None else RotatedEach(rotary, width)


def by_component(keys: Tensor, priors: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Keys (B, H, N, M width) as (M, B, H, N, width), and priors (H_kv, M) as (M, H, 1, 1), H a multiple of H_kv."""
    components = torch.stack(keys.split(width, -1))
    if priors is None:
        return components, keys.new_ones(1, keys.shape[1], 1, 1)
    shares = priors.to(keys.dtype).repeat_interleave(keys.shape[1] // len(priors), 0)
    return components, shares.T[:, :, None, None]


def each_key(keys: Tensor, visible: Tensor, priors: Tensor) -> tuple[Tensor, Tensor]:
    """The M keys of each of W positions as M W keys, where no feature map makes one sum of them.

    keys: (B, H_kv, C, W, M d); visible: (B, 1, C, L, W) bool; priors: (H_kv, M). Returns keys (B, H_kv, C, M W, d), the
    first of all positions first, and who sees them, (B, H_kv, C, L, M W): nobody sees a key of no weight.
    """
    each = torch.cat(keys.chunk(priors.shape[-1], -1), 3)
    seen = visible[..., None, :] & (priors > 0)[:, None, None, :, None]
    return each, seen.flatten(4)


def merged_components(weights: Tensor, priors: Tensor) -> Tensor:
    """sum_r pi_r w_r of each position, (B, H_kv, C, R, W), from weights of each key, (B, H_kv, C, R, M W)."""
    shares = priors.to(weights.dtype)[:, None, None, :, None]
    return (weights.unflatten(-1, (priors.shape[-1], -1)) * shares).sum(-2)
