"""Triton kernels of FLuRKA's backward over queries: their gradients through landmarks, and the state of queries.

With the factor c_i of sums over landmarks (`read_kernel`), f_i = sum_s w_is [v_s, 1] and the drift z_i, the pull of
their normalizer, dphi(q_i) = sum_s m_s (c_i do_i.v_s + z_i) phi(k_s). One normalizer: z_i = -c_i do_i.o_i, the sum of
what window and landmarks have in do_i.o_i. From the rounded o_i it would be off, which shows in the gradients of gamma
and beta, sums of differences over all tokens. Gated: the far part is a quotient of its own, so phi(q_i).dphi(q_i) = 0,
from which z_i follows without its output.
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.device import (
    add_landmarks,
    block_end,
    half_of_chunk,
    keep_state,
    landmark_weights,
    load_landmarks,
)
from megakernel.ops.kernel_attention.kernels import pulls
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_gradient
from megakernel.ops.kernels.states import (
    add_tokens,
    first_token,
    load_state,
    scales_of_addition,
    store_state,
)


@triton.jit
def state_factors(reads, log, r, UNBOUNDED: tl.constexpr):
    """Factors of a state (C,) for queries that measure from r; 0 where they do not see it."""
    if UNBOUNDED:
        return tl.where(reads & (r > EMPTY), tl.exp(tl.minimum(log - r, 0.0)), 0.0)
    return tl.where(reads, 1.0, 0.0)


@triton.jit
def write_queries(
    q,
    grad,
    factor,
    drift,
    scale,
    starts,
    matrix,
    sums,
    norms,
    logs,
    q_batch,
    q_head,
    q_row,
    g_batch,
    g_head,
    g_row,
    length,
    start,
    heads,
    segments,
    low,
    G: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    PHI: tl.constexpr,
):
    """What each segment's queries add to the gradient of the state that enters it; programs as in `read`."""
    MP: tl.constexpr = PHI.padded_rows
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    matrix += kv * PHI.rows * PHI.width
    group = head.to(tl.int64) * G * length
    begin = segment * CHUNKS * B
    q_far, g_far = tl.cast(q_row, tl.int64), tl.cast(g_row, tl.int64)

    tile = tl.zeros((MP, BV), tl.float32)
    tile2 = tile
    norm = tl.zeros((MP,), tl.float32)
    norm2 = norm
    log = EMPTY if PHI.unbounded else 0.0
    for at in range(begin, tl.minimum(begin + CHUNKS * B, length), C):
        # B need not be a multiple of C: the last tile of a segment may reach into the next one.
        left = tl.minimum(begin + CHUNKS * B, length) - at
        rows = at + tl.arange(0, C)
        first = first_token(starts, row, rows, length, start, PACKED)
        reads = (first < begin) & (tl.arange(0, C) < left)
        scales = tl.zeros((C,), tl.float32)
        if PHI.unbounded:
            r = tl.load(scale + head.to(tl.int64) * length + rows, mask=rows < length, other=EMPTY)
            reads = reads & (r > EMPTY)
            scales = tl.where(reads, -r, EMPTY)
        shrink, factors, log = scales_of_addition(log, scales, True, PHI.unbounded)
        tile *= shrink
        norm *= shrink
        if PHI.two:
            tile2 *= shrink
            norm2 *= shrink
        factors = tl.where(reads, factors, 0.0)
        for g in range(G):
            places = group + g * length + at
            given = grad + tl.cast(g, tl.int64) * g_head + at * g_far
            pull, of_norm = pulls(
                given, factor + places, drift + places, g_row, left, C, V - column, BV, column == 0
            )
            x = q + tl.cast(g, tl.int64) * q_head + at * q_far
            a, b, _ = phi(x, q_row, left, matrix, low, C, PHI)
            pull *= factors[:, None]
            of_norm *= factors
            tile, norm = add_tokens(tile, norm, 1.0, rounded(a, dtype), pull, of_norm, dtype)
            if PHI.two:
                tile2, norm2 = add_tokens(tile2, norm2, 1.0, rounded(b, dtype), pull, of_norm, dtype)
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
def pull_queries(
    q,
    grad,
    gate,
    mass,
    factor,
    near,
    scale,
    starts,
    ends,
    matrix,
    features,
    mark_logs,
    marked,
    sums,
    norms,
    logs,
    dq,
    dy,
    along,
    drift,
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
    tokens,
    G: tl.constexpr,
    C: tl.constexpr,
    GATED: tl.constexpr,
    QUOTIENT: tl.constexpr,
    LEARNED: tl.constexpr,
    MORE: tl.constexpr,
    MORE_PROJECTED: tl.constexpr,
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
    """Gradients of queries through landmarks, (blocks, B, H, N, D), and of projected ones (..., M).

    A part for each block of values; with MORE and MORE_PROJECTED they are added to what is there. So have drift and
    along (blocks, B, H, N), of c_i do_i.f_i, without the normalizer's if GATED; otherwise it is the gradient of
    far_weight. near: the window's part of do_i.o_i, unless GATED. QUOTIENT: the output does not depend on the length of
    phi(q). tokens: B H N.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    WIDTH: tl.constexpr = PHI.rows * (2 if PHI.two else 1)
    features += head.to(tl.int64) * chunks * R * WIDTH
    mark_logs += head.to(tl.int64) * chunks * R
    marked += head.to(tl.int64) * chunks * R * V + column
    matrix += kv * PHI.rows * PHI.width
    counts = tl.load(mass + kv)
    group = head.to(tl.int64) * G * length
    part = tl.program_id(1).to(tl.int64) * tokens + group
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
    for cp_shard in range(segment * CHUNKS * HALVES, tl.minimum((segment + 1) * CHUNKS, chunks) * HALVES):
        chunk, half = cp_shard // HALVES, cp_shard % HALVES
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        begin, close = half_of_chunk(half, chunk * B, tl.minimum(chunk * B + B, length), end)
        for at in range(begin, close, C):
            rows, left = at + tl.arange(0, C), close - at
            inside = rows < close
            reads = first_token(starts, row, rows, length, start, PACKED) < begin
            r = tl.zeros((C,), tl.float32)
            if PHI.unbounded:
                r = tl.load(scale + head.to(tl.int64) * length + rows, mask=inside, other=EMPTY)
            of_state = state_factors(reads, log, r, PHI.unbounded)
            for g in range(G):
                places = group + g * length + at
                given = grad + tl.cast(g, tl.int64) * g_head + at * g_far
                here = tl.arange(0, C)
                own = tl.load(factor + places + here, mask=inside, other=0.0)
                # The pull as it is in memory, multiplied by its factor behind the product: nothing is rounded.
                pull = load_rows(given, g_row, left, C, V - column, BV)
                grad_a = tl.trans(dot(tile, tl.trans(pull), dtype)) * (own * of_state)[:, None]
                grad_b = grad_a
                if PHI.two:
                    grad_b = tl.trans(dot(tile2, tl.trans(pull), dtype)) * (own * of_state)[:, None]
                x = q + tl.cast(g, tl.int64) * q_head + at * q_far
                qa, qb, _ = phi(x, q_row, left, matrix, low, C, PHI)
                # With the features that the output was made of.
                far = tl.sum(grad_a * rounded(qa, dtype).to(tl.float32), 1)
                if PHI.two:
                    far += tl.sum(grad_b * rounded(qb, dtype).to(tl.float32), 1)
                if GATED:
                    # 1 / den(f) is the factor without its share of the gate.
                    share = tl.sigmoid(-tl.load(gate + places + here, mask=inside, other=0.0))
                    level = tl.where(share == 0, 0.0, far / tl.where(share == 0, 1.0, share))
                else:
                    level = far + tl.load(near + places + here, mask=inside & (column == 0), other=0.0)
                of_norm = -own * level
                tl.store(drift + part + g * length + at + here, of_norm, mask=inside)
                of_norms = (of_norm * of_state)[:, None]
                grad_a += of_norms * norm[None, :]
                if PHI.two:
                    grad_b += of_norms * norm2[None, :]
                if not GATED:
                    far = tl.sum(grad_a * rounded(qa, dtype).to(tl.float32), 1)
                    if PHI.two:
                        far += tl.sum(grad_b * rounded(qb, dtype).to(tl.float32), 1)
                tl.store(along + part + g * length + at + here, far, mask=inside)
                if QUOTIENT:
                    # See `kernel_attention.query_kernels.pull_queries`.
                    length_q = tl.sum(qa * qa, 1)
                    along_q = tl.sum(grad_a * qa, 1)
                    if PHI.two:
                        length_q += tl.sum(qb * qb, 1)
                        along_q += tl.sum(grad_b * qb, 1)
                    share = along_q / tl.where(length_q == 0, 1.0, length_q)
                    grad_a -= qa * share[:, None]
                    if PHI.two:
                        grad_b -= qb * share[:, None]
                store_gradient(
                    x,
                    q_row,
                    left,
                    matrix,
                    qa,
                    qb,
                    grad_a,
                    grad_b,
                    dq + (part + g * length + at) * PHI.width,
                    dy + (part + g * length + at) * PHI.rows,
                    C,
                    LEARNED,
                    PHI,
                    MORE=MORE,
                    MORE_PROJECTED=MORE_PROJECTED,
                )
        alive = first_token(starts, row, close - 1, length, start, PACKED) < begin
        tile, norm, tile2, norm2, log = keep_state(
            tile, norm, tile2, norm2, log, alive, PHI.two, PHI.unbounded
        )
        # A branch around this would cost more registers than half 1, which adds nothing, costs time.
        weights = tl.where(half == 0, landmark_weights(end, counts, R, RP), 0.0)
        seat = chunk * R
        a, b, scales, columns = load_landmarks(
            features + seat * WIDTH,
            mark_logs + seat,
            marked + seat * V,
            column,
            R,
            RP,
            PHI.rows,
            PHI.padded_rows,
            V,
            BV,
            PHI.two,
            PHI.unbounded,
        )
        tile, norm, tile2, norm2, log = add_landmarks(
            tile, norm, tile2, norm2, log, a, b, scales, columns, weights, dtype, PHI.two, PHI.unbounded
        )
