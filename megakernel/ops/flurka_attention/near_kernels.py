"""Triton kernels of FLuRKA's backward inside windows: gradients of queries, and those of keys and values.

Programs hold whole rows and carry nothing: a token meets at most the b blocks tokens before it. A key's gradient also
has what its landmarks hand back, E^T dk_s and F^T dv_s. With the weights w_ij of a window and n_i, what they are
multiplied by (`device.near_factor`):

    dv_j = sum_i n_i w_ij do_i    ds_ij = n_i w_ij (do_i.v_j - delta_i)    delta_i = do_i.o_i

for scores s = q.k / sqrt(d), where o_i is the mean over the window alone if it is gated. Under phi, n_i (do_i.v_j -
delta_i) is the gradient of phi(q_i).phi(k_j).
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.device import (
    block_end,
    near_factor,
    products,
    turned,
    window_start,
    window_tile,
)
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, store_gradient, store_rows


@triton.jit
def window_weights(
    similar, logs, level, visible, SHARP: tl.constexpr, SOFTMAX: tl.constexpr, UNBOUNDED: tl.constexpr
):
    """Weights of pairs before `near_factor`, and what a change of `similar` changes them by.

    logs: log scales of keys, and level: peaks of queries, or r under phi; both spread over the tile.
    """
    if SOFTMAX:
        weights = tl.where(visible, tl.exp2(similar * SHARP - level), 0.0)
        return weights, weights * (SHARP * 0.6931471805599453)
    if UNBOUNDED:
        factors = tl.where(visible & (level > EMPTY), tl.exp(tl.minimum(logs - level, 0.0)), 0.0)
    else:
        factors = tl.where(visible, 1.0, 0.0)
    return similar * factors, factors


@triton.jit
def store_halves(
    dx,
    first,
    second,
    table,
    stride,
    count,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
):
    """Store gradients of rotated halves as those of the tokens themselves, rows of D."""
    if ROTARY:
        first, second = turned(first, second, table, stride, H, DH, True)
    store_rows(dx, D, count, first, H, DH)
    store_rows(dx + H, D, count, second, D - H, DH)


@triton.jit
def pull_window(
    q,
    k,
    v,
    grad,
    out,
    gate,
    far_weight,
    factor,
    peak,
    scale,
    windows,
    matrix,
    table,
    dq,
    dy,
    delta,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    g_batch,
    g_head,
    g_row,
    length,
    oldest,
    before,
    heads,
    tiles,
    low,
    G: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    LEARNED: tl.constexpr,
    GATED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SHARP: tl.constexpr,
    ROTARY: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Gradients of queries through their windows (B, H, N, D), of projected ones (..., M), and delta (B, H, N).

    Program: a tile of C queries of a head.
    """
    at = (tl.program_id(0) % tiles) * C
    head = tl.program_id(0) // tiles
    row, own = head // heads, head % heads
    kv = own // G
    rows, left = at + tl.arange(0, C), length - at
    inside = rows < length
    dtype: tl.constexpr = q.dtype.element_ty
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head + before * k_far
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + before * v_far
    q += row.to(tl.int64) * q_batch + own.to(tl.int64) * q_head + at.to(tl.int64) * q_row
    grad += row.to(tl.int64) * g_batch + own.to(tl.int64) * g_head + at.to(tl.int64) * g_row
    matrix += kv * M * D
    places = head.to(tl.int64) * length
    PAIR: tl.constexpr = SOFTMAX or TWO

    window = window_start(windows, row, rows, length, oldest, B, BLOCKS, ALIGNED)
    low_key, high_key = tl.min(window, 0), tl.minimum(at + C, length)
    angles = table + B * BLOCKS * 2 * H
    qa, qb, _ = window_tile(
        q,
        q_row,
        left,
        angles,
        matrix,
        low,
        C,
        SOFTMAX,
        ROTARY,
        H,
        DH,
        MAP,
        D,
        DP,
        M,
        MP,
        K,
        SCALE,
        COEFFICIENT,
    )
    pulls = load_rows(grad, g_row, left, C, V, VP)
    extra = 0.0 if GATED else tl.load(far_weight + own)
    of_window = near_factor(factor + places, gate + places, extra, rows, inside, GATED, SOFTMAX)
    level = of_window
    if SOFTMAX:
        level = tl.load(peak + places + rows, mask=inside, other=0.0)
    elif UNBOUNDED:
        level = tl.load(
            scale + (row * (heads // G) + kv).to(tl.int64) * length + rows, mask=inside, other=EMPTY
        )
    shift = tl.zeros((C,), tl.float32)
    if GATED:
        for place in range(low_key, high_key, BK):
            seats = place + tl.arange(0, BK)
            ka, kb, logs = window_tile(
                k + place * k_far,
                k_row,
                length - place,
                table + (place - at + B * BLOCKS) * 2 * H,
                matrix,
                low,
                BK,
                SOFTMAX,
                ROTARY,
                H,
                DH,
                MAP,
                D,
                DP,
                M,
                MP,
                K,
                SCALE,
                COEFFICIENT,
            )
            values = load_rows(v + place * v_far, v_row, length - place, BK, V, VP)
            seen = (seats[None, :] >= window[:, None]) & (seats[None, :] <= rows[:, None])
            weights, change = window_weights(
                products(qa, qb, ka, kb, PAIR, dtype),
                logs[None, :],
                level[:, None],
                seen,
                SHARP,
                SOFTMAX,
                UNBOUNDED,
            )
            shift += tl.sum(weights * dot(pulls, tl.trans(values), dtype), 1)
    else:
        shift = tl.sum(
            pulls.to(tl.float32) * load_rows(out + (places + at) * V, V, left, C, V, VP).to(tl.float32), 1
        )
    tl.store(delta + places + rows, shift, mask=inside)

    WIDTH: tl.constexpr = DH if SOFTMAX else MP
    of_a = tl.zeros((C, WIDTH), tl.float32)
    of_b = tl.zeros((C, WIDTH), tl.float32)
    for place in range(low_key, high_key, BK):
        seats = place + tl.arange(0, BK)
        ka, kb, logs = window_tile(
            k + place * k_far,
            k_row,
            length - place,
            table + (place - at + B * BLOCKS) * 2 * H,
            matrix,
            low,
            BK,
            SOFTMAX,
            ROTARY,
            H,
            DH,
            MAP,
            D,
            DP,
            M,
            MP,
            K,
            SCALE,
            COEFFICIENT,
        )
        values = load_rows(v + place * v_far, v_row, length - place, BK, V, VP)
        seen = (seats[None, :] >= window[:, None]) & (seats[None, :] <= rows[:, None])
        weights, change = window_weights(
            products(qa, qb, ka, kb, PAIR, dtype),
            logs[None, :],
            level[:, None],
            seen,
            SHARP,
            SOFTMAX,
            UNBOUNDED,
        )
        slope = (dot(pulls, tl.trans(values), dtype) - shift[:, None]) * of_window[:, None] * change
        of_a += dot(slope, ka, dtype)
        if PAIR:
            of_b += dot(slope, kb, dtype)
    gradient = dq + (places + at) * D
    if SOFTMAX:
        store_halves(gradient, of_a, of_b, angles, 2 * H, left, ROTARY, D, H, DH)
    else:
        qa, qb, _ = phi(q, q_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
        # As in `pull_queries`: across phi(q), here and there, for the sum of both is.
        along = tl.sum(of_a * qa, 1)
        size = tl.sum(qa * qa, 1)
        if TWO:
            along += tl.sum(of_b * qb, 1)
            size += tl.sum(qb * qb, 1)
        share = along / tl.where(size == 0, 1.0, size)
        of_a -= qa * share[:, None]
        of_b -= qb * share[:, None]
        store_gradient(
            q,
            q_row,
            left,
            matrix,
            qa,
            qb,
            of_a,
            of_b,
            gradient,
            dy + (places + at) * M,
            C,
            LEARNED,
            MAP,
            D,
            DP,
            M,
            MP,
            K,
            SCALE,
            COEFFICIENT,
        )


@triton.jit
def pull_keys(
    q,
    k,
    v,
    grad,
    gate,
    far_weight,
    factor,
    peak,
    scale,
    delta,
    windows,
    ends,
    matrix,
    table,
    pool_keys,
    pool_values,
    dmarks,
    dmarked,
    dk,
    dv,
    dy,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    g_batch,
    g_head,
    g_row,
    pool_head,
    length,
    oldest,
    before,
    heads,
    tiles,
    chunks,
    low,
    G: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    LEARNED: tl.constexpr,
    GATED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SHARP: tl.constexpr,
    ROTARY: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    ALIGNED: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Gradients of keys (B, H_kv, before + N, D), values (..., V) and projected keys (..., M); rows of tiles are keys.

    dmarks, dmarked: those of landmarks, (B, H_kv, chunks, R, D) and (..., V) float32. Program: BK keys of a key head.
    """
    at = (tl.program_id(0) % tiles) * BK - before
    head = tl.program_id(0) // tiles
    row, kv = head // heads, head % heads
    rows, left = at + tl.arange(0, BK), length - at
    dtype: tl.constexpr = q.dtype.element_ty
    q_far, g_far = tl.cast(q_row, tl.int64), tl.cast(g_row, tl.int64)
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head + (at + before).to(tl.int64) * k_row
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + (at + before).to(tl.int64) * v_row
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head
    matrix += kv * M * D
    scale += head.to(tl.int64) * length
    PAIR: tl.constexpr = SOFTMAX or TWO
    WIDTH: tl.constexpr = DH if SOFTMAX else MP

    ka, kb, logs = window_tile(
        k,
        k_row,
        left,
        table,
        matrix,
        low,
        BK,
        SOFTMAX,
        ROTARY,
        H,
        DH,
        MAP,
        D,
        DP,
        M,
        MP,
        K,
        SCALE,
        COEFFICIENT,
    )
    values = load_rows(v, v_row, left, BK, V, VP)
    of_a = tl.zeros((BK, WIDTH), tl.float32)
    of_b = tl.zeros((BK, WIDTH), tl.float32)
    of_values = tl.zeros((BK, VP), tl.float32)
    # Queries of all heads that see a key of the tile, in one loop.
    low_query = tl.maximum(at, 0)
    # Places may be negative: those of a tail, of whole blocks.
    reach = at + BK - 1 + B * BLOCKS
    high_query = tl.minimum(reach // B * B if ALIGNED else reach, length)
    steps = tl.maximum(tl.cdiv(high_query - low_query, C), 0)
    for step in range(G * steps):
        g = step // steps
        place = low_query + step % steps * C
        seats = place + tl.arange(0, C)
        inside = seats < length
        window = window_start(windows, row, seats, length, oldest, B, BLOCKS, ALIGNED)
        qa, qb, _ = window_tile(
            q + g * q_head + place * q_far,
            q_row,
            length - place,
            table + (place - at) * 2 * H,
            matrix,
            low,
            C,
            SOFTMAX,
            ROTARY,
            H,
            DH,
            MAP,
            D,
            DP,
            M,
            MP,
            K,
            SCALE,
            COEFFICIENT,
        )
        places = (head.to(tl.int64) * G + g) * length
        extra = 0.0 if GATED else tl.load(far_weight + kv * G + g)
        of_window = near_factor(factor + places, gate + places, extra, seats, inside, GATED, SOFTMAX)
        level = of_window
        if SOFTMAX:
            level = tl.load(peak + places + seats, mask=inside, other=0.0)
        elif UNBOUNDED:
            level = tl.load(scale + seats, mask=inside, other=EMPTY)
        shift = tl.load(delta + places + seats, mask=inside, other=0.0)
        pulls = load_rows(grad + g * g_head + place * g_far, g_row, length - place, C, V, VP)
        seen = (rows[:, None] >= window[None, :]) & (rows[:, None] <= seats[None, :]) & inside[None, :]
        weights, change = window_weights(
            products(ka, kb, qa, qb, PAIR, dtype),
            logs[:, None],
            level[None, :],
            seen,
            SHARP,
            SOFTMAX,
            UNBOUNDED,
        )
        of_values += dot(weights * of_window[None, :], pulls, dtype)
        slope = (dot(values, tl.trans(pulls), dtype) - shift[None, :]) * of_window[None, :] * change
        of_a += dot(slope, qa, dtype)
        if PAIR:
            of_b += dot(slope, qb, dtype)

    # Landmarks hand back to the tokens that they were pooled from.
    dmarks += head.to(tl.int64) * chunks * R * D
    dmarked += head.to(tl.int64) * chunks * R * V
    pooled_a = tl.zeros((BK, DH), tl.float32)
    pooled_b = tl.zeros((BK, DH), tl.float32)
    landmark = tl.arange(0, RP)
    nearest = at + B * (BLOCKS - 1)
    for chunk in range(tl.maximum(nearest, 0) // B, tl.minimum((nearest + BK + B - 2) // B + 1, chunks)):
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        inner = rows - (end - B * BLOCKS + 1)
        pooled = ((inner >= 0) & (inner < B) & (end >= 0))[:, None] & (landmark < R)[None, :]
        seats = kv * pool_head + landmark[None, :] * B + inner[:, None]
        of_keys = tl.load(pool_keys + seats, mask=pooled, other=0.0)
        part = dmarks + chunk * R * D
        pooled_a += dot(of_keys, load_rows(part, D, R, RP, H, DH), dtype)
        pooled_b += dot(of_keys, load_rows(part + H, D, R, RP, D - H, DH), dtype)
        of_pool = tl.load(pool_values + seats, mask=pooled, other=0.0)
        of_values += dot(of_pool, load_rows(dmarked + chunk * R * V, V, R, RP, V, VP), dtype)

    entry = head.to(tl.int64) * (before + length) + at + before
    store_rows(dv + entry * V, V, left, of_values, V, VP)
    if SOFTMAX:
        if ROTARY:
            of_a, of_b = turned(of_a, of_b, table, 2 * H, H, DH, True)
        store_halves(dk + entry * D, of_a + pooled_a, of_b + pooled_b, table, 2 * H, left, False, D, H, DH)
    else:
        store_halves(dk + entry * D, pooled_a, pooled_b, table, 2 * H, left, False, D, H, DH)
        tl.debug_barrier()
        ka, kb, _ = phi(k, k_row, left, matrix, low, BK, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
        store_gradient(
            k,
            k_row,
            left,
            matrix,
            ka,
            kb,
            of_a,
            of_b,
            dk + entry * D,
            dy + entry * M,
            BK,
            LEARNED,
            MAP,
            D,
            DP,
            M,
            MP,
            K,
            SCALE,
            COEFFICIENT,
            True,
        )
