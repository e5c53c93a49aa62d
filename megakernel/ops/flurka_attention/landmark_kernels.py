"""The Triton kernel of FLuRKA's backward over landmarks.

A program goes through the chunks of its segment from right to left and carries the state of the queries behind them,
whose values are pulls g_i = [c_i do_i, z_i] (`query_kernels`). With u_s = m_s [v_s, 1] of landmark s:

    dphi(k_s) = sum_i (g_i.u_s) phi(q_i)    dv_s = m_s sum_i (phi(q_i).phi(k_s)) c_i do_i

The gradient of m is not formed here: see `backward._of_mass`.
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.device import (
    block_end,
    half_of_chunk,
    keep_state,
    landmark_weights,
)
from megakernel.ops.kernel_attention.kernels import pull_of_state, pulls
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_gradient, store_rows
from megakernel.ops.kernels.states import (
    add_tokens,
    first_token,
    load_state,
    scales_of_addition,
)


@triton.jit
def pull_landmarks(
    q,
    grad,
    mass,
    factor,
    drift,
    scale,
    starts,
    ends,
    matrix,
    wide_matrix,
    marks,
    marked,
    sums,
    norms,
    logs,
    dmarks,
    dmarked,
    dy,
    q_batch,
    q_head,
    q_row,
    g_batch,
    g_head,
    g_row,
    length,
    start,
    oldest,
    heads,
    segments,
    chunks,
    low,
    rows_of_part,
    G: tl.constexpr,
    C: tl.constexpr,
    LEARNED: tl.constexpr,
    CHUNKS: tl.constexpr,
    B: tl.constexpr,
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
    """Gradients of landmarks: dmarks (blocks, B, H_kv, chunks, R, D), dmarked (B, H_kv, chunks, R, V) float32.

    Parts for each block of values, as dy (..., M) of projected landmarks. rows_of_part: B H_kv chunks R.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    own = head.to(tl.int64) * chunks * R
    marks += own * PHI.width
    marked += own * V + column
    dmarked += own * V + column
    part = tl.program_id(1).to(tl.int64) * rows_of_part + own
    scale += head.to(tl.int64) * length
    matrix += kv * PHI.rows * PHI.width
    wide_matrix += kv * PHI.rows * PHI.width
    counts = tl.load(mass + kv)
    group = head.to(tl.int64) * G * length
    entry = head.to(tl.int64) * (segments + 1) + segment
    FP: tl.constexpr = PHI.padded_features
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, PHI.padded_rows, VP, BV)
    tile2, norm2 = tile, norm
    if PHI.two:
        tile2, norm2 = load_state(sums, norms, column, 1, PHI.padded_rows, VP, BV)
    q_far, g_far = tl.cast(q_row, tl.int64), tl.cast(g_row, tl.int64)

    HALVES: tl.constexpr = 1 if ALIGNED else 2
    final = tl.minimum((segment + 1) * CHUNKS, chunks)
    for step in range((final - segment * CHUNKS) * HALVES):
        cp_shard = final * HALVES - 1 - step
        chunk, half = cp_shard // HALVES, cp_shard % HALVES
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        begin, close = half_of_chunk(half, chunk * B, tl.minimum(chunk * B + B, length), end)
        # The queries behind half 0 see its landmarks; half 1 has none, and no branch, which would cost registers.
        weights = tl.where(half == 0, landmark_weights(end, counts, R, RP), 0.0)
        count = tl.where(half == 0, R, 0)
        keys = marks + chunk * R * PHI.width
        columns = load_rows(marked + chunk * R * V, V, R, RP, V - column, BV)
        a, b, scales = phi(keys, PHI.width, R, wide_matrix, 0, RP, PHI)
        seen = tl.where(weights != 0, tl.exp(scales + log) if PHI.unbounded else 1.0, 0.0)
        du = dot(rounded(a, dtype), tile, dtype)
        if PHI.two:
            du += dot(rounded(b, dtype), tile2, dtype)
        seen *= weights
        store_rows(dmarked + chunk * R * V, V, count, du * seen[:, None], V - column, BV)
        columns *= seen[:, None]
        # The normalizer is in the first block alone.
        of_norm = tl.where(column == 0, seen, 0.0)
        grad_a = pull_of_state(tile, norm, columns, of_norm, dtype)
        grad_b = grad_a
        if PHI.two:
            grad_b = pull_of_state(tile2, norm2, columns, of_norm, dtype)
        store_gradient(
            keys,
            PHI.width,
            count,
            wide_matrix,
            a,
            b,
            tl.trans(grad_a),
            tl.trans(grad_b),
            dmarks + (part + chunk * R) * PHI.width,
            dy + (part + chunk * R) * PHI.rows,
            RP,
            LEARNED,
            PHI,
        )

        alive = first_token(starts, row, close - 1, length, start, PACKED) < begin
        tile, norm, tile2, norm2, log = keep_state(
            tile, norm, tile2, norm2, log, alive, PHI.two, PHI.unbounded
        )
        for at in range(begin, close, C):
            rows, left = at + tl.arange(0, C), close - at
            reads = (first_token(starts, row, rows, length, start, PACKED) < begin) & (rows < close)
            added = tl.zeros((C,), tl.float32)
            if PHI.unbounded:
                r = tl.load(scale + rows, mask=rows < close, other=EMPTY)
                reads = reads & (r > EMPTY)
                added = tl.where(reads, -r, EMPTY)
            shrink, factors, log = scales_of_addition(log, added, True, PHI.unbounded)
            factors = tl.where(reads, factors, 0.0)
            tile *= shrink
            norm *= shrink
            if PHI.two:
                tile2 *= shrink
                norm2 *= shrink
            for g in range(G):
                places = group + g * length + at
                given = grad + tl.cast(g, tl.int64) * g_head + at * g_far
                x = q + tl.cast(g, tl.int64) * q_head + at * q_far
                pull, pull_norm = pulls(
                    given, factor + places, drift + places, g_row, left, C, V - column, BV, column == 0
                )
                pull *= factors[:, None]
                pull_norm *= factors
                qa, qb, _ = phi(x, q_row, left, matrix, low, C, PHI)
                tile, norm = add_tokens(tile, norm, 1.0, rounded(qa, dtype), pull, pull_norm, dtype)
                if PHI.two:
                    tile2, norm2 = add_tokens(tile2, norm2, 1.0, rounded(qb, dtype), pull, pull_norm, dtype)
