"""What the kernels of FLuRKA share: where blocks lie, landmarks, and the two parts of a token's window.

The exact part of a token compares it with the keys of its window, by exp(q.k / sqrt(d)) if SOFTMAX and else by
phi(q).phi(k). Both are products of two halves: under a softmax the halves of q and k, each wide enough for a rotation,
which turns one against the other; under phi the halves of its features (`kernels.features`).
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import dot, load_rows, phi, rounded


@triton.jit
def window_start(
    windows, row, place, length, oldest, B: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr
):
    """The first key that the token at `place` compares itself with; behind the last token its window goes on."""
    if ALIGNED:
        return tl.maximum((place // B - (BLOCKS - 1)) * B, oldest)
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
    return tl.load(ends + row.to(tl.int64) * chunks + chunk)


@triton.jit
def landmark_weights(end, mass, R: tl.constexpr, RP: tl.constexpr):
    """How often each landmark of a chunk counts, (RP,); 0 where there is none."""
    return tl.where((tl.arange(0, RP) < R) & (end >= 0), mass, 0.0)


@triton.jit
def sees_landmarks(rows, first, end, weights):
    """Which landmarks of their own chunk queries see (C, RP): those of a block of their document that ended before."""
    behind = (rows > end) & (first <= end)
    return behind[:, None] & (weights != 0)[None, :]


@triton.jit
def load_pool(pool, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr):
    """E or F (R, B) float32 as a tile (RP, BP)."""
    return load_rows(pool, B, R, RP, B, BP)


@triton.jit
def turned(first, second, table, stride, H: tl.constexpr, DH: tl.constexpr, BACK: tl.constexpr):
    """Halves (C, DH) rotated by the angles of consecutive places: `table` has rows of cosines, then sines."""
    C: tl.constexpr = first.shape[0]
    cos = load_rows(table, stride, C, C, H, DH)
    sin = load_rows(table + H, stride, C, C, H, DH)
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
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
):
    """The halves of C tokens at `x` that a window compares, and their log scales (C,).

    table: angles from the place of the first token on.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    if SOFTMAX:
        a = load_rows(x, stride, count, C, H, DH)
        b = load_rows(x + H, stride, count, C, D - H, DH)
        logs = tl.zeros((C,), tl.float32)
        if ROTARY:
            a, b = turned(a.to(tl.float32), b.to(tl.float32), table, 2 * H, H, DH, False)
    else:
        a, b, logs = phi(x, stride, count, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
    return rounded(a, dtype), rounded(b, dtype), logs


@triton.jit
def products(a, b, a2, b2, PAIR: tl.constexpr, dtype: tl.constexpr):
    """Products of the tiles (a, b) and (a2, b2) of halves, row by row; without PAIR the first halves are all."""
    found = dot(a, tl.trans(a2), dtype)
    if PAIR:
        found += dot(b, tl.trans(b2), dtype)
    return found


@triton.jit
def near_factor(
    factor, gate, far_weight, rows, inside, GATED: tl.constexpr, SOFTMAX: tl.constexpr
):
    """What weights of a window are multiplied by, (C,): the gate, 1 beside a far part, or 1 / den under phi.

    factor: what sums over landmarks are multiplied by; under phi that is exp(far_weight) / den.
    """
    if GATED:
        return tl.sigmoid(tl.load(gate + rows, mask=inside, other=0.0))
    if SOFTMAX:
        return tl.full((rows.shape[0],), 1.0, tl.float32)
    return tl.load(factor + rows, mask=inside, other=0.0) * tl.exp(-far_weight)
