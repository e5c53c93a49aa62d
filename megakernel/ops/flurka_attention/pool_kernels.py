"""Triton kernels that pool blocks into landmarks, and sum the gradients of E and F."""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.arguments import block_end
from megakernel.ops.kernels.arguments import head_ptr
from megakernel.ops.kernels.primitives import dot, load_rows, rounded, store_rows


@triton.jit
def load_pool(pool, R: tl.constexpr, RP: tl.constexpr, B: tl.constexpr, BP: tl.constexpr):
    """E or F (R, B) float32, transposed, as a tile (BP, RP)."""
    b, r = tl.arange(0, BP)[:, None], tl.arange(0, RP)[None, :]
    return tl.load(pool + r * B + b, mask=(b < B) & (r < R), other=0.0)


@triton.jit
def store_landmarks(start, x, R: tl.constexpr, D: tl.constexpr):
    """Store a tile (DP, RP) as R rows of D elements."""
    d, r = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])[None, :]
    tl.store(start + r * D + d, rounded(x, start.dtype.element_ty), mask=(d < D) & (r < R))


@triton.jit
def pooled(tokens, pool, dtype: tl.constexpr):
    """Pooled tokens, (DP, RP) float32, from tokens (BP, DP).

    The pool is split into two terms of the tokens' dtype, so that landmarks have nearly float32 precision.
    """
    total = dot(tl.trans(tokens), pool, dtype)
    if dtype != tl.float32:
        total += dot(tl.trans(tokens), pool - rounded(pool, dtype).to(tl.float32), dtype)
    return total


@triton.jit
def tokens_of_block(window, seq, batch, block, NEAR: tl.constexpr):
    """Index (int64) of the first token that a block's landmarks are pooled from, and the number of tokens, b or 0."""
    end = block_end(window, seq, batch, block, NEAR)
    begin = tl.where(end >= 0, end - NEAR.reach + 1, 0) + window.before
    return begin.to(tl.int64), tl.where(end >= 0, NEAR.block_size, 0)


@triton.jit
def pool(
    window,
    pools,
    seq,
    landmarks,
    values,
    token_count,
    NEAR: tl.constexpr,
    TILING: tl.constexpr,
    PHI: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
):
    """Landmarks E K (B, H_kv, blocks R, D), F V (..., V), and their token counts. Program: one block of a key head.

    A block that does not end, or whose tokens are not available, has landmarks of 0 with token count 0.
    """
    R: tl.constexpr = TILING.rank
    B: tl.constexpr = NEAR.block_size
    blocks = tl.cdiv(seq.length, B)
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    batch, kv = head // seq.heads, head % seq.heads
    at, num_valid = tokens_of_block(window, seq, batch, block, NEAR)
    p_k = head_ptr(window.keys, batch, kv) + at * window.keys.row
    p_v = head_ptr(window.v, batch, kv) + at * window.v.row
    dtype: tl.constexpr = p_k.dtype.element_ty
    landmark_idx = (head.to(tl.int64) * blocks + block) * R
    tokens = load_rows(p_k, window.keys.row, num_valid, BP, PHI.width, PHI.padded_width)
    of_keys = load_pool(pools.of_keys + kv.to(tl.int64) * pools.head, R, RP, B, BP)
    store_landmarks(landmarks + landmark_idx * PHI.width, pooled(tokens, of_keys, dtype), R, PHI.width)
    tokens = load_rows(p_v, window.v.row, num_valid, BP, TILING.values, TILING.padded_values)
    of_values = load_pool(pools.of_values + kv.to(tl.int64) * pools.head, R, RP, B, BP)
    store_landmarks(values + landmark_idx * TILING.values, pooled(tokens, of_values, dtype), R, TILING.values)
    r = tl.arange(0, RP)
    each = B / R * (1.0 if pools.far_mass is None else tl.exp(tl.load(pools.far_mass + kv).to(tl.float32)))
    counts = tl.where(num_valid > 0, each, 0.0)
    tl.store(token_count + landmark_idx + r, tl.zeros((RP,), tl.float32) + counts, mask=r < R)


@triton.jit
def pool_backward(
    window,
    seq,
    pool_parts,
    of_keys,
    of_values,
    EACH: tl.constexpr,
    NEAR: tl.constexpr,
    TILING: tl.constexpr,
    PHI: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
):
    """Gradients of E and F from EACH blocks, (B, H_kv, parts, R, B) float32. Program: EACH blocks of a key head.

    The summands of each key are the two `pool_parts` of `window_kernels.window_backward`.
    """
    R: tl.constexpr = TILING.rank
    B: tl.constexpr = NEAR.block_size
    blocks = tl.cdiv(seq.length, B)
    parts = tl.cdiv(blocks, EACH)
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch = head // seq.heads
    row_idx = head.to(tl.int64) * (window.before + seq.length)
    total_k = tl.zeros((BP, RP), tl.float32)
    total_v = total_k
    for block in range(part * EACH, tl.minimum(part * EACH + EACH, blocks)):
        at, num_valid = tokens_of_block(window, seq, batch, block, NEAR)
        total_k += load_rows(pool_parts[0] + (row_idx + at) * R, R, num_valid, BP, R, RP)
        total_v += load_rows(pool_parts[1] + (row_idx + at) * R, R, num_valid, BP, R, RP)
    offset = tl.program_id(0).to(tl.int64) * (B * R)
    store_rows(of_keys + offset, B, R, tl.trans(total_k), B, BP)
    store_rows(of_values + offset, B, R, tl.trans(total_v), B, BP)
