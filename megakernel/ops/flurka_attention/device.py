"""What the kernels of FLuRKA share: where blocks lie, landmarks, and the two parts of a token's window.

The exact part of a token compares it with the keys of its window, by exp(q.k / sqrt(d)) if SOFTMAX and else by
phi(q).phi(k). Both are products of two halves: under a softmax the halves of q and k, each wide enough for a rotation,
which turns one against the other; under phi the halves of its features (`kernels.features`).
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded
from megakernel.ops.kernels.states import add_tokens, scales_of_addition


@triton.jit
def window_start(
    windows, row, place, length, oldest, B: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr
):
    """The first key that the token at `place` compares itself with; behind the last token its window goes on."""
    if ALIGNED:
        return tl.maximum((place // B - (BLOCKS - 1)) * B, oldest)
    else:
        return tl.load(windows + row.to(tl.int64) * length + tl.minimum(place, length - 1))


@triton.jit
def block_end(
    ends, row, chunk, chunks, length, oldest, B: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Where in this chunk a block ends and landmarks become visible; -1: nowhere.

    They are those of the B tokens that begin B BLOCKS - 1 places before.
    """
    if ALIGNED:
        end = chunk * B + B - 1
        return tl.where((end < length) & (end - B * BLOCKS + 1 >= oldest), end, -1)
    else:
        return tl.load(ends + row.to(tl.int64) * chunks + chunk)


@triton.jit
def landmark_weights(end, mass, R: tl.constexpr, RP: tl.constexpr):
    """How often each landmark of a chunk counts, (RP,); 0 where there is none."""
    return tl.where((tl.arange(0, RP) < R) & (end >= 0), mass, 0.0)


@triton.jit
def half_of_chunk(half, begin, close, end):
    """The tokens of a chunk begin .. close - 1 up to the end of a block, or as half 1 those behind it.

    Only these see its landmarks: between the halves they enter the state. Without an end all tokens are in half 0.
    """
    middle = tl.where(end >= 0, end + 1, close)
    return tl.where(half == 0, begin, middle), tl.where(half == 0, middle, close)


@triton.jit
def keep_state(tile, norm, tile2, norm2, log, alive, TWO: tl.constexpr, UNBOUNDED: tl.constexpr):
    """The state where `alive`, the empty one where a document starts."""
    kept = tl.where(alive, 1.0, 0.0)
    if UNBOUNDED:
        log = tl.where(alive, log, EMPTY)
    if TWO:
        tile2, norm2 = tile2 * kept, norm2 * kept
    return tile * kept, norm * kept, tile2, norm2, log


@triton.jit
def add_landmarks(
    tile,
    norm,
    tile2,
    norm2,
    log,
    a,
    b,
    scales,
    columns,
    weights,
    dtype: tl.constexpr,
    TWO: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """A state, and landmarks of features a, b (RP, MP) with values `columns` (RP, BV), as often as `weights` say."""
    scales = tl.where(weights != 0, scales, EMPTY) if UNBOUNDED else scales
    shrink, factors, log = scales_of_addition(log, scales, True, UNBOUNDED)
    weights *= factors
    columns *= weights[:, None]
    tile, norm = add_tokens(tile, norm, shrink, a, columns, weights, dtype)
    if TWO:
        tile2, norm2 = add_tokens(tile2, norm2, shrink, b, columns, weights, dtype)
    return tile, norm, tile2, norm2, log


@triton.jit
def load_landmarks(
    features,
    scales,
    marked,
    column,
    R: tl.constexpr,
    RP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    TWO: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """What `pool` left of a chunk's landmarks: halves of their features, log scales and values."""
    WIDTH: tl.constexpr = M * (2 if TWO else 1)
    a = load_rows(features, WIDTH, R, RP, M, MP)
    b = load_rows(features + M, WIDTH, R, RP, M, MP) if TWO else a
    landmark = tl.arange(0, RP)
    logs = tl.zeros((RP,), tl.float32)
    if UNBOUNDED:
        logs = tl.load(scales + landmark, mask=landmark < R, other=0.0)
    return a, b, logs, load_rows(marked, V, R, RP, V - column, BV)


@triton.jit
def load_pool(pool, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr):
    """E or F (R, B) float32 as a tile (RP, BP)."""
    return load_rows(pool, B, R, RP, B, BP)


@triton.jit
def turned(first, second, table, H: tl.constexpr, DH: tl.constexpr, BACK: tl.constexpr):
    """Halves (C, DH) rotated by the angles of consecutive places: `table` has rows of H cosines, then H sines."""
    rows, columns = tl.arange(0, first.shape[0])[:, None], tl.arange(0, DH)[None, :]
    # Constant offsets, unlike those of `load_rows`, which would stay in registers through a loop.
    places = table + (rows * (2 * H) + columns)
    cos = tl.load(places, mask=columns < H, other=0.0)
    sin = tl.load(places + H, mask=columns < H, other=0.0)
    sin = -sin if BACK else sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def window_tile(
    x,
    stride,
    count,
    table,
    matrix,
    low,
    C: tl.constexpr,
    SOFTMAX: tl.constexpr,
    ROTARY: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
    PHI: tl.constexpr,
):
    """The halves of C tokens at `x` that a window compares, and their log scales (C,).

    table: angles from the place of the first token on.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    if SOFTMAX:
        a = load_rows(x, stride, count, C, H, DH)
        b = load_rows(x + H, stride, count, C, PHI.width - H, DH)
        logs = tl.zeros((C,), tl.float32)
        if ROTARY:
            a, b = turned(a.to(tl.float32), b.to(tl.float32), table, H, DH, False)
            # Sums of one number each, which cost nothing: without them the compiler for sm_80 rotates in the layout
            # that a product's factors have, where every warp holds all of a tile and its angles.
            a, b = tl.sum(a[:, :, None], 2), tl.sum(b[:, :, None], 2)
    else:
        a, b, logs = phi(x, stride, count, matrix, low, C, PHI)
    return rounded(a, dtype), rounded(b, dtype), logs


@triton.jit
def products(a, b, a2, b2, PAIR: tl.constexpr, dtype: tl.constexpr):
    """Products of the tiles (a, b) and (a2, b2) of halves, row by row; without PAIR the first halves are all."""
    found = dot(a, tl.trans(a2), dtype)
    if PAIR:
        found += dot(b, tl.trans(b2), dtype)
    return found


@triton.jit
def near_factor(factor, gate, far_weight, rows, inside, GATED: tl.constexpr, SOFTMAX: tl.constexpr):
    """What weights of a window are multiplied by, (C,): the gate, 1 beside a far part, or 1 / den under phi.

    factor: what sums over landmarks are multiplied by; under phi that is exp(far_weight) / den.
    """
    if GATED:
        return tl.sigmoid(tl.load(gate + rows, mask=inside, other=0.0))
    elif SOFTMAX:
        return tl.full((rows.shape[0],), 1.0, tl.float32)
    else:
        return tl.load(factor + rows, mask=inside, other=0.0) * tl.exp(-far_weight)
