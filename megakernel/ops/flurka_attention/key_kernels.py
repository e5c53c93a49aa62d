"""The Triton kernel of FLuRKA's backward over keys and values: through windows, and from their landmarks.

See `window_kernels`; a key's gradient also has what its landmarks hand back, E^T dk_s and F^T dv_s.
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
from megakernel.ops.flurka_attention.window_kernels import store_halves, window_weights
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, store_gradient, store_rows


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
    PHI: tl.constexpr,
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
    matrix += kv * PHI.rows * PHI.width
    scale += head.to(tl.int64) * length
    PAIR: tl.constexpr = SOFTMAX or PHI.two
    WIDTH: tl.constexpr = DH if SOFTMAX else PHI.padded_rows

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
        PHI,
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
        g = tl.cast(step // steps, tl.int64) if G > 1 else 0
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
            PHI,
        )
        places = (head.to(tl.int64) * G + g) * length
        extra = 0.0 if GATED else tl.load(far_weight + kv * G + g)
        of_window = near_factor(factor + places, gate + places, extra, seats, inside, GATED, SOFTMAX)
        level = of_window
        if SOFTMAX:
            level = tl.load(peak + places + seats, mask=inside, other=0.0)
        elif PHI.unbounded:
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
            PHI.unbounded,
        )
        of_values += dot(weights * of_window[None, :], pulls, dtype)
        slope = (dot(values, tl.trans(pulls), dtype) - shift[None, :]) * of_window[None, :] * change
        of_a += dot(slope, qa, dtype)
        if PAIR:
            of_b += dot(slope, qb, dtype)

    # Landmarks hand back to the tokens that they were pooled from.
    dmarks += head.to(tl.int64) * chunks * R * PHI.width
    dmarked += head.to(tl.int64) * chunks * R * V
    pooled_a = tl.zeros((BK, DH), tl.float32)
    pooled_b = tl.zeros((BK, DH), tl.float32)
    landmark = tl.arange(0, RP)
    nearest = at + B * (BLOCKS - 1)
    for chunk in range(tl.maximum(nearest, 0) // B, tl.minimum((nearest + BK + B - 2) // B + 1, chunks)):
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        inner = rows - (end - B * BLOCKS + 1)
        pooled = ((inner >= 0) & (inner < B) & (end >= 0))[:, None] & (landmark < R)[None, :]
        seats = landmark[None, :] * B + inner[:, None]
        of_keys = tl.load(pool_keys + kv.to(tl.int64) * pool_head + seats, mask=pooled, other=0.0)
        part = dmarks + chunk * R * PHI.width
        pooled_a += dot(of_keys, load_rows(part, PHI.width, R, RP, H, DH), dtype)
        pooled_b += dot(of_keys, load_rows(part + H, PHI.width, R, RP, PHI.width - H, DH), dtype)
        of_pool = tl.load(pool_values + kv.to(tl.int64) * pool_head + seats, mask=pooled, other=0.0)
        of_values += dot(of_pool, load_rows(dmarked + chunk * R * V, V, R, RP, V, VP), dtype)

    entry = head.to(tl.int64) * (before + length) + at + before
    store_rows(dv + entry * V, V, left, of_values, V, VP)
    if SOFTMAX:
        if ROTARY:
            of_a, of_b = turned(of_a, of_b, table, H, DH, True)
        store_halves(
            dk + entry * PHI.width, of_a + pooled_a, of_b + pooled_b, table, left, False, PHI.width, H, DH
        )
    else:
        store_halves(dk + entry * PHI.width, pooled_a, pooled_b, table, left, False, PHI.width, H, DH)
        tl.debug_barrier()
        ka, kb, _ = phi(k, k_row, left, matrix, low, BK, PHI)
        store_gradient(
            k,
            k_row,
            left,
            matrix,
            ka,
            kb,
            of_a,
            of_b,
            dk + entry * PHI.width,
            dy + entry * PHI.rows,
            BK,
            LEARNED,
            PHI,
            MORE=True,
        )
