"""Triton kernels of FLuRKA's landmarks: the states that they add up to, and the gradients of E and F."""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.device import add_landmarks, block_end, landmark_weights, load_pool
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_rows
from megakernel.ops.kernels.states import first_token, store_state


@triton.jit
def pooled(pool, x, stride, exists, B: tl.constexpr, BP: tl.constexpr, D, DP: tl.constexpr):
    """E (RP, BP) float32 times the B tokens at `x`, (RP, DP) float32; zeros, and no token touched, unless `exists`.

    Tokens are what they are in memory, and E is the sum of two terms of their dtype: landmarks keep float32's digits.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    tokens = load_rows(x, stride, tl.where(exists, B, 0), BP, D, DP)
    total = dot(pool, tokens, dtype)
    if dtype != tl.float32:
        total += dot(pool - rounded(pool, dtype).to(tl.float32), tokens, dtype)
    return total


@triton.jit
def pool(
    k,
    v,
    pool_keys,
    pool_values,
    mass,
    starts,
    ends,
    matrix,
    marks,
    features,
    mark_logs,
    marked,
    sums,
    norms,
    logs,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    pool_head,
    length,
    start,
    oldest,
    before,
    heads,
    segments,
    chunks,
    CHUNKS: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    ALIGNED: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    PHI: tl.constexpr,
):
    """Landmarks E K (B, H_kv, chunks, R, D) and F V (..., V), and what each segment's add to the state that leaves it.

    For `read` and backward also phi(E K) (B, H_kv, chunks, R, F) in the dtype of tokens, and its log scales.
    Program: (segment of CHUNKS chunks of a key head, block of values).
    """
    MP: tl.constexpr = PHI.padded_rows
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = k.dtype.element_ty
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head + before * k_far
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + before * v_far + column
    marks += head.to(tl.int64) * chunks * R * PHI.width
    WIDTH: tl.constexpr = PHI.rows * (2 if PHI.two else 1)
    features += head.to(tl.int64) * chunks * R * WIDTH
    mark_logs += head.to(tl.int64) * chunks * R
    marked += head.to(tl.int64) * chunks * R * V + column
    matrix += kv * PHI.rows * PHI.width
    counts, landmark = tl.load(mass + kv), tl.arange(0, RP)
    of_keys = load_pool(pool_keys + kv.to(tl.int64) * pool_head, R, RP, B, BP)
    of_values = load_pool(pool_values + kv.to(tl.int64) * pool_head, R, RP, B, BP)
    final = tl.minimum((segment + 1) * CHUNKS, chunks)
    last = first_token(starts, row, tl.minimum(final * B, length) - 1, length, start, PACKED)

    tile = tl.zeros((MP, BV), tl.float32)
    tile2 = tile
    norm = tl.zeros((MP,), tl.float32)
    norm2 = norm
    log = EMPTY if PHI.unbounded else 0.0
    for chunk in range(segment * CHUNKS, final):
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        begin = end - B * BLOCKS + 1
        seat = chunk * R
        # Half of a wide key at a time: a block of whole ones would take too many registers.
        HALF: tl.constexpr = PHI.padded_width if PHI.padded_width < 128 else PHI.padded_width // 2
        for first in range(0, PHI.padded_width, HALF):
            keys = pooled(
                of_keys, k + (begin * k_far + first), k_row, end >= 0, B, BP, PHI.width - first, HALF
            )
            store_rows(marks + (seat * PHI.width + first), PHI.width, R, keys, PHI.width - first, HALF)
        columns = pooled(of_values, v + begin * v_far, v_row, end >= 0, B, BP, V - column, BV)
        store_rows(marked + seat * V, V, R, columns, V - column, BV)
        # phi reads landmarks from where they were just written.
        tl.debug_barrier()
        weights = tl.where(end >= last, landmark_weights(end, counts, R, RP), 0.0)
        a, b, scales = phi(marks + seat * PHI.width, PHI.width, R, matrix, 0, RP, PHI)
        a, b = rounded(a, dtype), rounded(b, dtype)
        if column == 0:
            store_rows(features + seat * WIDTH, WIDTH, R, a, PHI.rows, PHI.padded_rows)
            if PHI.two:
                store_rows(features + seat * WIDTH + PHI.rows, WIDTH, R, b, PHI.rows, PHI.padded_rows)
            if PHI.unbounded:
                tl.store(mark_logs + seat + landmark, scales, mask=landmark < R)
        tile, norm, tile2, norm2, log = add_landmarks(
            tile, norm, tile2, norm2, log, a, b, scales, columns, weights, dtype, PHI.two, PHI.unbounded
        )
    entry = head.to(tl.int64) * (segments + 1) + segment
    FP: tl.constexpr = PHI.padded_features
    sums += entry * FP * VP
    norms += entry * FP
    store_state(tile, norm, sums, norms, column, 0, PHI.padded_rows, VP, BV)
    if PHI.two:
        store_state(tile2, norm2, sums, norms, column, 1, PHI.padded_rows, VP, BV)
    if column == 0:
        tl.store(logs + entry, log)


@triton.jit
def pull_pools(
    k,
    v,
    ends,
    dmarks,
    dmarked,
    dkeys,
    dvalues,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    length,
    oldest,
    before,
    heads,
    segments,
    chunks,
    CHUNKS: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    ALIGNED: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
):
    """What each segment's blocks add to the gradients of E and F, (B, H_kv, segments, R, B) float32.

    They are those of landmarks, float32 in memory, times tokens. Program: segment of a key head.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    dtype: tl.constexpr = k.dtype.element_ty
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head + before * k_far
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + before * v_far
    dmarks += head.to(tl.int64) * chunks * R * D
    dmarked += head.to(tl.int64) * chunks * R * V
    of_keys = tl.zeros((RP, BP), tl.float32)
    of_values = tl.zeros((RP, BP), tl.float32)
    for chunk in range(segment * CHUNKS, tl.minimum((segment + 1) * CHUNKS, chunks)):
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        begin, count = end - B * BLOCKS + 1, tl.where(end >= 0, B, 0)
        tokens = load_rows(k + begin * k_far, k_row, count, BP, D, DP)
        of_keys += dot(
            load_rows(dmarks + chunk * R * D, D, R, RP, D, DP),
            tl.trans(tokens),
            dtype,
        )
        tokens = load_rows(v + begin * v_far, v_row, count, BP, V, VP)
        of_values += dot(load_rows(dmarked + chunk * R * V, V, R, RP, V, VP), tl.trans(tokens), dtype)
    entry = tl.program_id(0).to(tl.int64) * R * B
    store_rows(dkeys + entry, B, R, of_keys, B, BP)
    store_rows(dvalues + entry, B, R, of_values, B, BP)
