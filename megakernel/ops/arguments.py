"""Checks of what users hand to ops: name, what was given, what is expected."""

from itertools import pairwise

import torch
from torch import Tensor

from megakernel.ops.feature_maps import FEATURE_MAPS
from megakernel.ops.state import KernelState


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q (B, H, N, d); k (B, H_kv, N, d); v (B, H_kv, N, D); one floating dtype and device; H a multiple of H_kv."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, heads, tokens, width)")
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}; expected a floating type")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}; expected {q.dtype} on {q.device} like q")
    batch, heads, length, width = q.shape
    if k.shape[0] != batch or k.shape[2:] != (length, width):
        raise ValueError(f"k has shape {tuple(k.shape)}; expected ({batch}, heads, {length}, {width}) like q")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected {tuple(k.shape[:3])} and a width, like k")
    if heads % k.shape[1]:
        raise ValueError(f"q has {heads} heads and k {k.shape[1]}; expected a multiple")
    if length == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected at least one token")


def check_feature_map(feature_map: str, projection: Tensor | None, k: Tensor) -> None:
    """A known name, and the projection (F, d) or (H_kv, F, d) exactly where the map takes one."""
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map={feature_map!r}; expected one of {', '.join(FEATURE_MAPS)}")
    projected = FEATURE_MAPS[feature_map].projected
    if projected != (projection is not None):
        given = "None" if projection is None else f"of shape {tuple(projection.shape)}"
        raise ValueError(f"projection is {given}; {feature_map} {'needs one' if projected else 'takes none'}")
    if projection is None:
        return
    heads, width = k.shape[1], k.shape[3]
    shape = tuple(projection.shape)
    if projection.dim() not in (2, 3) or shape[-1] != width or (projection.dim() == 3 and shape[0] != heads):
        raise ValueError(
            f"projection has shape {shape}; expected (features, {width}) or ({heads}, features, {width})"
        )
    if projection.device != k.device:
        raise ValueError(f"projection is on {projection.device}; expected {k.device} like k")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Increasing int32 or int64 document starts, then the number of tokens of the whole batch."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; "
            "expected a vector of int32 or int64"
        )
    listed = cu_seqlens.tolist()
    if not listed or listed[-1] != tokens or listed[0] < 0:
        raise ValueError(f"cu_seqlens={listed}; expected starts from 0 on and B * N = {tokens} at the end")
    if any(a >= b for a, b in pairwise(listed)):
        raise ValueError(f"cu_seqlens={listed}; expected strictly increasing offsets")


def check_positions(positions: Tensor, q: Tensor) -> None:
    """Positions (B, N), integer."""
    expected = (q.shape[0], q.shape[2])
    if tuple(positions.shape) != expected or positions.is_floating_point():
        raise ValueError(
            f"positions is {positions.dtype} of shape {tuple(positions.shape)}; "
            f"expected integers of shape {expected}"
        )


def expand_tokens(name: str, value: Tensor, like: Tensor) -> Tensor:
    """One number per head and token: `value` expanded to the first three dimensions of `like`."""
    expected = tuple(like.shape[:3])
    try:
        return value.expand(expected)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected to broadcast to {expected}"
        ) from None


def check_state(state: KernelState, k: Tensor, v: Tensor) -> None:
    """Sums (B, H_kv, F, D + 1) and log scales (B, H_kv) of these keys and values."""
    lead, width = tuple(k.shape[:2]), v.shape[-1] + 1
    shape = tuple(state.sums.shape)
    if len(shape) != 4 or shape[:2] != lead or shape[3] != width or tuple(state.log_scale.shape) != lead:
        raise ValueError(
            f"initial_state has sums {shape} and log_scale {tuple(state.log_scale.shape)}; "
            f"expected {(*lead, 'features', width)} and {lead}"
        )


def check_choice(name: str, value: object, known: tuple) -> None:
    """One of a few values."""
    if value not in known:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, known))}")


def check_pools(pool_keys: Tensor, pool_values: Tensor, k: Tensor) -> None:
    """E and F, both (r, b) or (H_kv, r, b)."""
    for name, pool in (("pool_keys", pool_keys), ("pool_values", pool_values)):
        if (
            pool.shape != pool_keys.shape
            or pool.dim() not in (2, 3)
            or pool.shape[:-2] not in ((), k.shape[1:2])
        ):
            raise ValueError(
                f"{name} has shape {tuple(pool.shape)}; expected (rank, block) or ({k.shape[1]}, rank, block), "
                "the same for both pools"
            )


def check_per_head(name: str, value: Tensor | None, heads: int) -> None:
    """One number per head."""
    if value is not None and tuple(value.shape) != (heads,):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected ({heads},)")
