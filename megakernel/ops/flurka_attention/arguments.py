"""Arguments of FLuRKA's kernels that belong together, as Triton takes them, and where in them a token is.

Landmarks are the keys of `kernel_attention`'s kernels: r for each b tokens of a sequence, with the token that they
stand at. What is here is the rest: windows, pools and how the two parts of an output are merged.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.arguments import load_numbers
from megakernel.ops.kernels.features import cdiv, padded


class Near(NamedTuple):
    """The exact part of a layer, at compile time."""

    softmax: bool
    """exp(q.k / sqrt(d)), else phi(q).phi(k)."""

    gated: bool
    rotary: bool
    blocks: int
    """Blocks of a window, the current one included."""

    block_size: int
    """b"""

    width: int
    """d of the tokens."""

    @property
    def reach(self) -> int:
        """Tokens of the longest window."""
        return self.blocks * self.block_size

    @property
    def half(self) -> int:
        """Numbers of the first half of a token, which a rotation turns against the second."""
        return cdiv(self.width, 2)

    @property
    def padded_half(self) -> int:
        """The same as the power of two that a tile has."""
        return padded(self.half)

    @property
    def sharp(self) -> float:
        """What a product is multiplied by for the base 2 logarithm of its weight."""
        return self.width**-0.5 / math.log(2)


class Window(NamedTuple):
    """The tokens that windows are of, which begin with those of a tail."""

    keys: Any
    """`Rows`, as those of values, `v`; None where nobody reads them."""

    v: Any
    windows: Any
    """(B, N) int32: the first token of each token's window; None where blocks are those of the sequence."""

    table: Any
    """(reach + ANGLES, 2 half) float32: cosines and sines of the angles of consecutive places; None without."""

    before: int
    """Tokens of the tail."""

    oldest: int
    """The first place of the open document that there is a key of, at most 0."""


class Pools(NamedTuple):
    """E and F (r, b) float32, and how often a landmark counts."""

    of_keys: Any
    of_values: Any
    head: int
    """Numbers from a head's pool to the next one's, 0 where heads share one."""

    far_mass: Any
    """beta (H_kv,): a landmark counts (b / r) exp(beta) times; None is 0."""


class Shares(NamedTuple):
    """How the two parts of an output are merged."""

    gate: Any
    """(B, H, N) logits of the window's share, None of one normalizer."""

    far_weight: Any
    """gamma (H,), of one normalizer; None is 0."""


class Merged(NamedTuple):
    """What backward knows of the weights of an output."""

    factor: Any
    """What sums over landmarks are multiplied by, (B, H, N) float32."""

    lse: Any
    """The weights of a window under a softmax are 2^(log2 w - lse) of the output, or of its own mean if gated."""

    scale: Any
    """r (B, H_kv, N) float32 of unbounded maps."""

    share: Any
    """Of landmarks in the normalizer, (B, H, N) float32; None beside a gate, which says it."""


@triton.jit
def window_start(window, seq, batch, places, NEAR: tl.constexpr):
    """The first key that the tokens at `places` compare themselves with; behind the last token its window goes on."""
    if window.windows is None:
        start = (places // NEAR.block_size - (NEAR.blocks - 1)) * NEAR.block_size
        start = tl.maximum(start, window.oldest)
    else:
        seats = tl.minimum(places, seq.length - 1)
        start = tl.load(window.windows + batch.to(tl.int64) * seq.length + seats)
    return start


@triton.jit
def gate_of(shares, head, at, first, length, C: tl.constexpr, NEAR: tl.constexpr):
    """Logits (C,) of the tokens from `at` on, whose documents start at `first`: infinite where no block is far."""
    logits = load_numbers(shares.gate + head.to(tl.int64) * length, at, length, C).to(tl.float32)
    return tl.where(at + tl.arange(0, C) - first >= NEAR.reach, logits, float("inf"))


@triton.jit
def gamma_of(shares, query_head):
    """The logarithm of what a head's landmarks count."""
    if shares.far_weight is None:
        gamma = tl.full((), 0.0, tl.float32)
    else:
        gamma = tl.load(shares.far_weight + query_head).to(tl.float32)
    return gamma


@triton.jit
def block_end(window, seq, batch, block, NEAR: tl.constexpr):
    """Where in the sequence's b tokens of this number a block ends and landmarks become visible; negative: nowhere.

    They are those of the b tokens that begin `reach` - 1 places before.
    """
    if seq.ends is None:
        end = (block + 1) * NEAR.block_size - 1
        end = tl.where((end < seq.length) & (end - NEAR.reach + 1 >= window.oldest), end, -1)
    else:
        end = tl.load(seq.ends + batch.to(tl.int64) * tl.cdiv(seq.length, NEAR.block_size) + block)
    return end


@triton.jit
def angles(window, place, NEAR: tl.constexpr):
    """The angles of the tokens from `place` on."""
    return window.table + place * (2 * NEAR.half) if NEAR.rotary else None
