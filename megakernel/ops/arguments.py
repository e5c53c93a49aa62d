"""Argument checks of ops. Errors name the argument, its value and what is expected."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.feature_maps import FEATURE_MAPS, Map, named
from megakernel.ops.projections import FastFood, Projection, padded_width
from megakernel.ops.tensors import accum_dtype


def check_heads(q: Tensor, k: Tensor, v: Tensor, *, cross: bool = False) -> None:
    """Check q (B, H, N, d), k (B, H_kv, N, d), v (B, H_kv, N, D): one floating dtype and device, H a multiple of H_kv.

    cross: keys and values may have another number of tokens than queries.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tokens(name, x)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}; expected {q.dtype} on {q.device} like q")
    batch, heads, length, width = q.shape
    length = k.shape[2] if cross else length
    if k.shape[0] != batch or k.shape[2:] != (length, width):
        raise ValueError(f"k has shape {tuple(k.shape)}; expected ({batch}, heads, {length}, {width}) like q")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has shape {tuple(v.shape)}; expected {tuple(k.shape[:3])} and a width, like k")
    if heads % k.shape[1]:
        raise ValueError(f"q has {heads} heads and k {k.shape[1]}; expected a multiple")
    check_not_empty(q)


def check_not_empty(q: Tensor) -> None:
    """Check that q (B, H, N, d) has at least one token."""
    if q.shape[2] == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected at least one token")


def check_tokens(name: str, x: Tensor) -> None:
    """Check that x is (batch, heads, tokens, width) and of a floating dtype."""
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, heads, tokens, width)")
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; expected a floating type")


def check_feature_map(feature_map: Map | str, projection: Projection | None, k: Tensor) -> None:
    """Check the map's name, and the projection: present iff the map takes one, and fitting the heads and width of k."""
    name, _, smoothing = named(feature_map)
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r}; expected one of {', '.join(FEATURE_MAPS)}")
    if smoothing < 0:
        raise ValueError(f"feature_map has smoothing={smoothing}; expected at least 0")
    projected = FEATURE_MAPS[name].projected
    if projected != (projection is not None):
        value = f"of shape {tuple(projection.shape)}" if isinstance(projection, Tensor) else repr(projection)
        raise ValueError(f"projection is {value}; {name} {'needs one' if projected else 'takes none'}")
    if isinstance(projection, FastFood):
        _check_fast_food(projection, k)
    elif projection is not None:
        _check_matrix(projection, k)


def _check_matrix(projection: Tensor, k: Tensor) -> None:
    heads, width = k.shape[1], k.shape[3]
    shape = tuple(projection.shape)
    if projection.dim() not in (2, 3) or shape[-1] != width or (projection.dim() == 3 and shape[0] != heads):
        raise ValueError(
            f"projection has shape {shape}; expected (features, {width}) or ({heads}, features, {width})"
        )
    if projection.device != k.device:
        raise ValueError(f"projection is on {projection.device}; expected {k.device} like k")


def _check_fast_food(projection: FastFood, k: Tensor) -> None:
    heads, size = k.shape[1], padded_width(k.shape[3])
    for name, part in projection._asdict().items():
        shape = tuple(part.shape)
        if len(shape) != 3 or shape[::2] != (heads, size) or shape != projection.scales.shape:
            raise ValueError(
                f"projection.{name} has shape {shape}; expected ({heads}, blocks, {size}), the same for all parts"
            )
        if part.device != k.device:
            raise ValueError(f"projection.{name} is on {part.device}; expected {k.device} like k")


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Check int32 or int64 document starts, strictly increasing and followed by the number of tokens of the batch."""
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


def check_positions(positions: Positions, q: Tensor) -> None:
    """Check that positions are integers (B, N), or one integer."""
    if isinstance(positions, int):
        return
    expected = (q.shape[0], q.shape[2])
    if not isinstance(positions, Tensor):
        raise ValueError(f"positions={positions!r}; expected an int, or a tensor of shape {expected}")
    if tuple(positions.shape) != expected or positions.is_floating_point() or positions.dtype == torch.bool:
        raise ValueError(
            f"positions is {positions.dtype} of shape {tuple(positions.shape)}; "
            f"expected integers of shape {expected}"
        )


def expand_tokens(name: str, value: Tensor, like: Tensor) -> Tensor:
    """`value` expanded to the first three dimensions (B, H, N) of `like`."""
    return expand(name, value, like.shape[:3])


def expand_log_decay(log_decay: Tensor, k: Tensor) -> Tensor:
    """Log decays (B, H_kv, N) of the tokens k (B, H_kv, N, d), in float32 or better.

    A decay to less than the square of the dtype's precision leaves nothing of a state. Lower log decays are clamped to
    that one: in cumulative sums they would swamp the others.
    """
    log_decay = expand_tokens("log_decay", log_decay, k).to(accum_dtype(k.dtype))
    return log_decay.clamp(min=2 * math.log(torch.finfo(log_decay.dtype).eps))


def expand(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """`value` expanded to `shape`; ValueError if it does not broadcast."""
    expected = tuple(shape)
    try:
        return value.expand(expected)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected to broadcast to {expected}"
        ) from None


def check_priors(priors: Tensor, k: Tensor) -> None:
    """Check priors pi (H_kv, M) of keys (B, H_kv, M, N, d)."""
    if k.dim() != 5 or tuple(priors.shape) != tuple(k.shape[1:3]):
        raise ValueError(
            f"priors has shape {tuple(priors.shape)} and k {tuple(k.shape)}; "
            "expected (heads, keys) and (batch, heads, keys, tokens, width)"
        )


def check_shift(shift: Tensor, priors: Tensor | None, k: Tensor) -> None:
    """Check shifts b (H_kv, M, d) of keys (B, H_kv, N, d), and priors pi (H_kv, M)."""
    fits = shift.dim() == 3 and k.dim() == 4 and (shift.shape[0], shift.shape[2]) == (k.shape[1], k.shape[3])
    if not fits or priors is None or priors.shape != shift.shape[:2]:
        priors_text = "no priors" if priors is None else f"priors {tuple(priors.shape)}"
        raise ValueError(
            f"shift has shape {tuple(shift.shape)}, k {tuple(k.shape)}, and {priors_text}; "
            "expected (heads, keys, width), (batch, heads, tokens, width) and (heads, keys)"
        )


def check_entering(initial_state: object, exchange: object) -> None:
    """Check that a state enters from at most one side."""
    if initial_state is not None and exchange is not None:
        raise ValueError(
            "initial_state next to exchange, which returns the entering state; expected one of them"
        )


def matrix_state(initial_state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
    """The state (B, H_kv, d, D) of a decaying sum of k v^T, in float32 or better; zeros for None."""
    shape, dtype = (*k.shape[:2], k.shape[3], v.shape[3]), accum_dtype(k.dtype)
    if initial_state is None:
        return k.new_zeros(shape, dtype=dtype)
    if initial_state.shape != shape:
        raise ValueError(f"initial_state has shape {tuple(initial_state.shape)}; expected {shape}")
    return initial_state.to(dtype)


def check_cached(
    name: str, cached: tuple[Tensor, Tensor], k: Tensor, v: Tensor, tokens: int | None = None
) -> None:
    """Check that keys and values of earlier tokens fit k and v (..., N, d): `tokens` of them; None: any number."""
    for part, before, new in zip(("keys", "values"), cached, (k, v)):
        # No generators: this runs in every layer for every decoded token.
        fits = before.shape[:-2] == new.shape[:-2] and before.shape[-1] == new.shape[-1]
        if not fits or tokens not in (None, before.shape[-2]):
            expected = ", ".join(map(str, (*new.shape[:-2], tokens or "tokens", new.shape[-1])))
            raise ValueError(f"{name}.{part} has shape {tuple(before.shape)}; expected ({expected})")


def check_choice(name: str, value: object, known: tuple) -> None:
    """Check that `value` is one of `known`."""
    if value not in known:
        raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, known))}")


def check_pools(pool_keys: Tensor, pool_values: Tensor, k: Tensor) -> None:
    """Check E and F: both (r, b) or both (H_kv, r, b)."""
    for name, pool in (("pool_keys", pool_keys), ("pool_values", pool_values)):
        fits = pool.dim() in (2, 3) and pool.shape[:-2] in ((), k.shape[1:2])
        if not fits or pool.shape != pool_keys.shape or 0 in pool.shape:
            raise ValueError(
                f"{name} has shape {tuple(pool.shape)}; expected (rank, block) or ({k.shape[1]}, rank, block), "
                "the same for both pools"
            )


def check_gate_weight(weight: Tensor | None, gate: Tensor | None, q: Tensor) -> None:
    """Check w (H, d) of a gate's logits q.w: None, or next to a gate."""
    if weight is None:
        return
    if gate is None:
        raise ValueError("gate_weight is given without gate; expected both")
    if tuple(weight.shape) != (q.shape[1], q.shape[3]):
        raise ValueError(f"gate_weight has shape {tuple(weight.shape)}; expected {(q.shape[1], q.shape[3])}")


def check_per_head(name: str, value: Tensor | None, heads: int) -> None:
    """Check that `value` is None or (heads,)."""
    if value is not None and tuple(value.shape) != (heads,):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; expected ({heads},)")
