"""Triton kernels of FLuRKA's backward inside windows: the gradients of queries, and what `key_kernels` shares.

Programs hold whole rows and carry nothing: a token meets at most the b blocks tokens before it. With the weights w_ij
of a window and n_i, what they are multiplied by (`device.near_factor`):

    dv_j = sum_i n_i w_ij do_i    ds_ij = n_i w_ij (do_i.v_j - delta_i)    delta_i = do_i.o_i

for scores s = q.k / sqrt(d), where o_i is the mean over the window alone if it is gated. Under phi, n_i (do_i.v_j -
delta_i) is the gradient of phi(q_i).phi(k_j).
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.device import (
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
    count,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
):
    """Store gradients of rotated halves as those of the tokens themselves, rows of D."""
    if ROTARY:
        first, second = turned(first, second, table, H, DH, True)
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
    near,
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
    PHI: tl.constexpr,
):
    """Gradients of queries through their windows (B, H, N, D), of projected ones (..., M), and delta (B, H, N).

    Unless GATED also the window's part of delta, near (B, H, N), from values and not from the rounded output.
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
    matrix += kv * PHI.rows * PHI.width
    places = head.to(tl.int64) * length
    PAIR: tl.constexpr = SOFTMAX or PHI.two

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
        PHI,
    )
    pulls = load_rows(grad, g_row, left, C, V, VP)
    extra = 0.0 if GATED else tl.load(far_weight + own)
    of_window = near_factor(factor + places, gate + places, extra, rows, inside, GATED, SOFTMAX)
    level = of_window
    if SOFTMAX:
        level = tl.load(peak + places + rows, mask=inside, other=0.0)
    elif PHI.unbounded:
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
                PHI,
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
                PHI.unbounded,
            )
            shift += tl.sum(weights * dot(pulls, tl.trans(values), dtype), 1)
    else:
        shift = tl.sum(
            pulls.to(tl.float32) * load_rows(out + (places + at) * V, V, left, C, V, VP).to(tl.float32), 1
        )
    tl.store(delta + places + rows, shift, mask=inside)

    WIDTH: tl.constexpr = DH if SOFTMAX else PHI.padded_rows
    of_a = tl.zeros((C, WIDTH), tl.float32)
    of_b = tl.zeros((C, WIDTH), tl.float32)
    total = tl.zeros((C,), tl.float32)
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
            PHI,
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
            PHI.unbounded,
        )
        along = dot(pulls, tl.trans(values), dtype)
        total += tl.sum(weights * along, 1)
        slope = (along - shift[:, None]) * of_window[:, None] * change
        of_a += dot(slope, ka, dtype)
        if PAIR:
            of_b += dot(slope, kb, dtype)
    if not GATED:
        tl.store(near + places + rows, total * of_window, mask=inside)
    gradient = dq + (places + at) * PHI.width
    if SOFTMAX:
        store_halves(gradient, of_a, of_b, angles, left, ROTARY, PHI.width, H, DH)
    else:
        qa, qb, _ = phi(q, q_row, left, matrix, low, C, PHI)
        # As in `pull_queries`: across phi(q), here and there, for the sum of both is.
        along = tl.sum(of_a * qa, 1)
        size = tl.sum(qa * qa, 1)
        if PHI.two:
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
            dy + (places + at) * PHI.rows,
            C,
            LEARNED,
            PHI,
        )
