"""Grouped arguments of FLuRKA's Triton kernels, and device functions that index them.

Landmarks are keys of `kernel_attention`'s kernels: r per b tokens of a sequence, each with its place. This module has
the rest: windows, pools, and how the two parts of an output are merged.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernels.arguments import load_vector
from megakernel.ops.kernels.primitives import cdiv, padded, store_rows


class NearParams(NamedTuple):
    """Compile-time options of a layer's exact part."""

    softmax: bool
    """exp(q.k / sqrt(d)), else phi(q).phi(k)."""

    gated: bool
    rotary: bool
    blocks: int
    """Blocks per window, including the current one."""

    block_size: int
    """b"""

    width: int
    """d of the tokens."""

    @property
    def reach(self) -> int:
        """Tokens in the longest window."""
        return self.blocks * self.block_size

    @property
    def half(self) -> int:
        """Elements in the first half of a token, which a rotation pairs with the second."""
        return cdiv(self.width, 2)

    @property
    def padded_half(self) -> int:
        """`half` padded to the power of two of a tile."""
        return padded(self.half)

    @property
    def softmax_scale_log2(self) -> float:
        """Factor that turns q.k into the base 2 logarithm of its weight."""
        return self.width**-0.5 / math.log(2)


class Window(NamedTuple):
    """Keys and values of windows, which begin with those of the tail."""

    keys: Any
    """`Rows`, like the values, `v`; both None if unused."""

    v: Any
    windows: Any
    """(B, N) int32: the first place of each token's window; None if the sequence's own chunks of b are the blocks."""

    table: Any
    """(reach + ANGLES, 2 half) float32: cosines and sines of consecutive places; None without rotation."""

    before: int
    """Tokens in the tail."""

    oldest: int
    """The first place of the open document that has a key, at most 0."""


class Pools(NamedTuple):
    """E and F (r, b) float32, and the landmark token count."""

    of_keys: Any
    of_values: Any
    head: int
    """Stride in elements between the pools of two heads; 0 if heads share one."""

    far_mass: Any
    """beta (H_kv,): a landmark has the token count (b / r) exp(beta); None is 0."""


class MergeParams(NamedTuple):
    """How the two parts of an output are merged."""

    gate: Any
    """(B, H, N) logits of the window's share, in backward with the queries' part; None for one shared normalizer."""

    gate_weight: Any
    """w (H, D) of the queries' part of the logits; None is 0."""

    far_weight: Any
    """gamma (H,), for a shared normalizer; None is 0."""


class Merged(NamedTuple):
    """What backward needs about the weights of an output."""

    factor: Any
    """Factor of the sums over landmarks, (B, H, N) float32."""

    lse: Any
    """Base 2 log-sum-exp: softmax weights of the window are 2^(log2 w - lse), within the window's own mean if gated."""

    scale: Any
    """r (B, H_kv, N) float32, for unbounded maps."""

    share: Any
    """The landmarks' share of the normalizer, (B, H, N) float32; None with a gate, from which it follows."""

    logit: Any
    """The gate's logits with the queries' part, (B, H, N) float32; None without that part."""


class WindowSums(NamedTuple):
    """Sums over the windows of the first T queries of a shard, computed before its entering state has arrived."""

    near: Any
    """Weighted sums of values, (B, H, T, V) float32."""

    den: Any
    """Sums of weights, (B, H, T) float32."""

    row_max: Any
    """Log scale of both, (B, H, T) float32; base 2 for a softmax."""

    tokens: Any
    """T"""


@triton.jit
def load_window_sums(ahead, near, den, row_max, tile, TILING: tl.constexpr):
    """A tile's `WindowSums`; the given ones for queries without."""
    row_idx = tile.head.to(tl.int64) * ahead.tokens + tile.at
    C: tl.constexpr = TILING.chunk
    has_sums = tile.rows < tl.minimum(tile.end, ahead.tokens)
    rows = row_idx + tl.arange(0, C)
    columns = tl.arange(0, TILING.padded_values)
    mask = has_sums[:, None] & (columns < TILING.values)[None, :]
    near = tl.load(ahead.near + rows[:, None] * TILING.values + columns[None, :], mask=mask, other=near)
    den = tl.load(ahead.den + rows, mask=has_sums, other=den)
    return near, den, tl.load(ahead.row_max + rows, mask=has_sums, other=row_max)


@triton.jit
def store_window_sums(ahead, near, den, row_max, tile, TILING: tl.constexpr):
    """The inverse of `load_window_sums`."""
    C: tl.constexpr = TILING.chunk
    row_idx = tile.head.to(tl.int64) * ahead.tokens + tile.at
    inside = tile.rows < tile.end
    num_valid = tile.end - tile.at
    store_rows(
        ahead.near + row_idx * TILING.values,
        TILING.values,
        num_valid,
        near,
        TILING.values,
        TILING.padded_values,
    )
    tl.store(ahead.den + row_idx + tl.arange(0, C), den, mask=inside)
    tl.store(ahead.row_max + row_idx + tl.arange(0, C), row_max, mask=inside)


@triton.jit
def window_start(window, seq, batch, token_idx, NEAR: tl.constexpr):
    """The first place in the windows of the tokens at `token_idx`; places past the last token share its window."""
    if window.windows is None:
        start = (token_idx // NEAR.block_size - (NEAR.blocks - 1)) * NEAR.block_size
        start = tl.maximum(start, window.oldest)
    else:
        clamped_idx = tl.minimum(token_idx, seq.length - 1)
        start = tl.load(window.windows + batch.to(tl.int64) * seq.length + clamped_idx)
    return start


@triton.jit
def load_gate(merge_params, head, at, first, length, C: tl.constexpr, NEAR: tl.constexpr):
    """Gate logits (C,) of the tokens from `at` on, whose documents start at `first`; inf if they see no landmark."""
    logits = load_vector(merge_params.gate + head.to(tl.int64) * length, at, length, C).to(tl.float32)
    return tl.where(at + tl.arange(0, C) - first >= NEAR.reach, logits, float("inf"))


@triton.jit
def load_gate_weight(merge_params, query_head, first, W: tl.constexpr, P: tl.constexpr, NEAR: tl.constexpr):
    """W elements of a query head's gate weight from the element `first` on, as (P,) float32."""
    column = tl.arange(0, P)
    row = merge_params.gate_weight + query_head * NEAR.width + first
    return tl.load(row + column, mask=column < W, other=0.0).to(tl.float32)


@triton.jit
def load_gamma(merge_params, query_head):
    """gamma of a query head, 0 by default."""
    if merge_params.far_weight is None:
        gamma = tl.full((), 0.0, tl.float32)
    else:
        gamma = tl.load(merge_params.far_weight + query_head).to(tl.float32)
    return gamma


@triton.jit
def block_end(window, seq, batch, block, NEAR: tl.constexpr):
    """The place in this chunk of b tokens where a block ends and landmarks become visible; negative if there is none.

    The landmarks are those of the b tokens that start `reach` - 1 places earlier.
    """
    if seq.ends is None:
        end = (block + 1) * NEAR.block_size - 1
        end = tl.where((end < seq.length) & (end - NEAR.reach + 1 >= window.oldest), end, -1)
    else:
        end = tl.load(seq.ends + batch.to(tl.int64) * tl.cdiv(seq.length, NEAR.block_size) + block)
    return end


@triton.jit
def angles_ptr(window, place, NEAR: tl.constexpr):
    """Pointer to the angles of the tokens from `place` on, or None."""
    return window.table + place * (2 * NEAR.half) if NEAR.rotary else None
