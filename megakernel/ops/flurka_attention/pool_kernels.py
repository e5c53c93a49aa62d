"""Triton kernels that pool blocks into landmarks, and give the gradients of E and F."""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.arguments import block_end
from megakernel.ops.kernel_attention.arguments import head_at
from megakernel.ops.kernels.features import dot, load_rows, rounded


@triton.jit
def load_pool(pool, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr):
    """E or F (R, B) float32, transposed, as a tile (BP, RP)."""
    b, r = tl.arange(0, BP)[:, None], tl.arange(0, RP)[None, :]
    return tl.load(pool + r * B + b, mask=(b < B) & (r < R), other=0.0)


@triton.jit
def store_landmarks(start, x, R: tl.constexpr, D: tl.constexpr):
    """Store a tile (DP, RP) as R rows of D numbers."""
    d, r = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    tl.store(start + r * D + d, rounded(x, start.dtype.element_ty), mask=(d < D) & (r < R))


@triton.jit
def pooled(tokens, pool, dtype: tl.constexpr):
    """Tokens (BP, DP) pooled, (DP, RP) float32.

    Tokens are what they are in memory, and the pool is the sum of two terms of their dtype: landmarks keep float32's
    digits.
    """
    total = dot(tl.trans(tokens), pool, dtype)
    if dtype != tl.float32:
        total += dot(tl.trans(tokens), pool - rounded(pool, dtype).to(tl.float32), dtype)
    return total


@triton.jit
def tokens_of_block(window, row, batch, block, NEAR: tl.constexpr):
    """The number of the first token that landmarks are pooled from, int64, and how many there are: b or 0."""
    end = block_end(window, row, batch, block, NEAR)
    begin = tl.where(end >= 0, end - NEAR.reach + 1, 0) + window.before
    return begin.to(tl.int64), tl.where(end >= 0, NEAR.block_size, 0)


@triton.jit
def pool(
    window,
    pools,
    row,
    landmarks,
    values,
    mass,
    NEAR: tl.constexpr,
    CUT: tl.constexpr,
    PHI: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
):
    """Landmarks E K (B, H_kv, blocks R, D), F V (..., V), and how often each counts. Program: a block of a key head.

    A block that does not end, or whose tokens are not at hand, has landmarks of 0 that count nothing.
    """
    R: tl.constexpr = CUT.rank
    B: tl.constexpr = NEAR.block_size
    blocks = tl.cdiv(row.length, B)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, kv = head // row.heads, head % row.heads
    at, count = tokens_of_block(window, row, batch, block, NEAR)
    k = head_at(window.keys, batch, kv) + at * window.keys.row
    v = head_at(window.columns, batch, kv) + at * window.columns.row
    dtype: tl.constexpr = k.dtype.element_ty
    seat = (head.to(tl.int64) * blocks + block) * R
    tokens = load_rows(k, window.keys.row, count, BP, PHI.width, PHI.padded_width)
    of_keys = load_pool(pools.of_keys + kv.to(tl.int64) * pools.head, R, RP, B, BP)
    store_landmarks(landmarks + seat * PHI.width, pooled(tokens, of_keys, dtype), R, PHI.width)
    tokens = load_rows(v, window.columns.row, count, BP, CUT.values, CUT.padded_values)
    of_values = load_pool(pools.of_values + kv.to(tl.int64) * pools.head, R, RP, B, BP)
    store_landmarks(values + seat * CUT.values, pooled(tokens, of_values, dtype), R, CUT.values)
    r = tl.arange(0, RP)
    counts = tl.where(count > 0, tl.load(pools.mass + kv), 0.0)
    tl.store(mass + seat + r, tl.zeros((RP,), tl.float32) + counts, mask=r < R)


@triton.jit
def pool_backward(
    window,
    row,
    dlandmarks,
    dvalues,
    of_keys,
    of_values,
    EACH: tl.constexpr,
    NEAR: tl.constexpr,
    CUT: tl.constexpr,
    PHI: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
):
    """What EACH blocks add to the gradients of E and F, (B, H_kv, parts, R, B) float32: of landmarks times tokens.

    Program: EACH blocks of a key head.
    """
    R: tl.constexpr = CUT.rank
    B: tl.constexpr = NEAR.block_size
    blocks = tl.cdiv(row.length, B)
    parts = tl.cdiv(blocks, EACH)
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, kv = head // row.heads, head % row.heads
    k, v = head_at(window.keys, batch, kv), head_at(window.columns, batch, kv)
    dtype: tl.constexpr = k.dtype.element_ty
    total_k = tl.zeros((RP, BP), tl.float32)
    total_v = total_k
    for block in range(part * EACH, tl.minimum(part * EACH + EACH, blocks)):
        at, count = tokens_of_block(window, row, batch, block, NEAR)
        seat = (head.to(tl.int64) * blocks + block) * R
        tokens = load_rows(k + at * window.keys.row, window.keys.row, count, BP, PHI.width, PHI.padded_width)
        grad = load_rows(dlandmarks + seat * PHI.width, PHI.width, R, RP, PHI.width, PHI.padded_width)
        total_k += dot(grad, tl.trans(tokens), dtype)
        tokens = load_rows(
            v + at * window.columns.row, window.columns.row, count, BP, CUT.values, CUT.padded_values
        )
        grad = load_rows(dvalues + seat * CUT.values, CUT.values, R, RP, CUT.values, CUT.padded_values)
        total_v += dot(grad, tl.trans(tokens), dtype)
    r, b = tl.arange(0, RP)[:, None], tl.arange(0, BP)[None, :]
    place = tl.program_id(0).to(tl.int64) * (R * B) + r * B + b
    tl.store(of_keys + place, total_k, mask=(r < R) & (b < B))
    tl.store(of_values + place, total_v, mask=(r < R) & (b < B))
