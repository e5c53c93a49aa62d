"""The Triton kernel of FLuRKA's outputs.

A program carries the state of the landmarks seen so far through the chunks of its segment, in registers. Of query i,
with the sums n_i = sum_j w_ij [v_j, 1] over its window and f_i = sum_s (phi(q_i).phi(k_s)) m_s [v_s, 1] over landmarks,

    gated:   o_i = g_i n_i / den(n_i) + (1 - g_i) f_i / den(f_i)
    shared:  o_i = (n_i + exp(gamma) f_i) / (den(n_i) + exp(gamma) den(f_i))

Backward needs what f_i is multiplied by (`factor`) and what logs of a window's weights are measured from (`peak`): the
weights of its keys are then exp2(log2 w_ij - peak_i), times g_i if gated; under phi, factor and far_weight give them.
Maps without an upper bound add the log scale r_i that f_i is measured in, as in `kernel_attention.kernels`.
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
    products,
    window_start,
    window_tile,
)
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_rows
from megakernel.ops.kernels.states import first_token, load_state


@triton.jit
def weigh_window(logs, pairs, top, visible, SOFTMAX: tl.constexpr, UNBOUNDED: tl.constexpr):
    """Weights of a tile of keys, what sums before it shrink by, and the log that both are measured from.

    logs: log2 of the weights under a softmax, of which `pairs` then are unused; else log scales of the keys.
    """
    if SOFTMAX:
        logs = tl.where(visible, logs, float("-inf"))
        larger = tl.maximum(top, tl.max(logs, 1))
        return tl.exp2(logs - larger[:, None]), tl.exp2(top - larger), larger
    if UNBOUNDED:
        logs = tl.where(visible, logs, EMPTY)
        larger = tl.maximum(top, tl.max(logs, 1))
        return tl.where(visible, pairs * tl.exp(logs - larger[:, None]), 0.0), tl.exp(top - larger), larger
    return tl.where(visible, pairs, 0.0), tl.zeros_like(top) + 1.0, top


@triton.jit
def joined(
    near, den, top, far, far_den, far_log, gate, far_weight, GATED: tl.constexpr, SOFTMAX: tl.constexpr
):
    """Outputs, and `factor` and `peak` of each query: for phi's window, whose top is no power of 2, peak is r.

    The sums over landmarks are measured from exp(far_log); the far weight comes on top.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    if GATED:
        peak = top + tl.log2(den)
        share = tl.sigmoid(gate)
        factor = tl.where(far_den == 0, 0.0, (1 - share) / tl.where(far_den == 0, 1.0, far_den))
        return near * (share / den)[:, None] + far * factor[:, None], factor, peak
    if SOFTMAX:
        far_log = tl.where(far_den == 0, EMPTY, (far_log + far_weight) * LOG2E)
        larger = tl.maximum(top, far_log)
        of_near, of_far = tl.exp2(top - larger), tl.exp2(far_log - larger)
        peak = larger + tl.log2(den * of_near + far_den * of_far)
        of_near, of_far = tl.exp2(top - peak), tl.exp2(far_log - peak)
        return near * of_near[:, None] + far * of_far[:, None], of_far, peak
    larger = tl.maximum(top, far_log)
    of_near, of_far = tl.exp(top - larger), tl.exp(far_log + far_weight - larger)
    total = den * of_near + far_den * of_far
    inverse = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    out = (near * of_near[:, None] + far * of_far[:, None]) * inverse[:, None]
    return out, inverse * tl.exp(far_weight), larger


@triton.jit
def read(
    q,
    k,
    v,
    gate,
    far_weight,
    mass,
    starts,
    windows,
    ends,
    matrix,
    table,
    features,
    mark_logs,
    marked,
    sums,
    norms,
    logs,
    out,
    factor,
    peak,
    scale,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    length,
    start,
    oldest,
    before,
    heads,
    segments,
    chunks,
    low,
    G: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SHARP: tl.constexpr,
    ROTARY: tl.constexpr,
    H: tl.constexpr,
    DH: tl.constexpr,
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
    """Outputs (B, H, N, V); factor and peak (B, H, N), and r of unbounded maps (B, H_kv, N), float32.

    Program: (segment of CHUNKS chunks of a key head, block of values). SHARP: log2(e) / sqrt(d).
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q_far, k_far, v_far = tl.cast(q_row, tl.int64), tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head + before * k_far
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + before * v_far + column
    WIDTH: tl.constexpr = PHI.rows * (2 if PHI.two else 1)
    features += head.to(tl.int64) * chunks * R * WIDTH
    mark_logs += head.to(tl.int64) * chunks * R
    marked += head.to(tl.int64) * chunks * R * V + column
    matrix += kv * PHI.rows * PHI.width
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
    PAIR: tl.constexpr = SOFTMAX or PHI.two

    # Half chunks, where landmarks become visible inside them.
    HALVES: tl.constexpr = 1 if ALIGNED else 2
    for cp_shard in range(segment * CHUNKS * HALVES, tl.minimum((segment + 1) * CHUNKS, chunks) * HALVES):
        chunk, half = cp_shard // HALVES, cp_shard % HALVES
        end = block_end(ends, row, chunk, chunks, length, oldest, B, BLOCKS, ALIGNED)
        begin, close = half_of_chunk(half, chunk * B, tl.minimum(chunk * B + B, length), end)
        for at in range(begin, close, C):
            rows, left = at + tl.arange(0, C), close - at
            inside = rows < close
            first = first_token(starts, row, rows, length, start, PACKED)
            window = window_start(windows, row, rows, length, oldest, B, BLOCKS, ALIGNED)
            reads = first < begin
            r = tl.where(reads, log, EMPTY) if PHI.unbounded else tl.zeros((C,), tl.float32)
            for g in range(G):
                x = q + tl.cast(g, tl.int64) * q_head + at * q_far
                # Angles count from the oldest place that a window of the tile can reach.
                qa, qb, _ = window_tile(
                    x,
                    q_row,
                    left,
                    table + B * BLOCKS * 2 * H,
                    matrix,
                    low,
                    C,
                    SOFTMAX,
                    ROTARY,
                    H,
                    DH,
                    PHI,
                )
                near = tl.zeros((C, BV), tl.float32)
                den = tl.zeros((C,), tl.float32)
                top = tl.full((C,), EMPTY if (SOFTMAX or PHI.unbounded) else 0.0, tl.float32)
                for place in range(tl.min(window, 0), tl.minimum(at + C, close), BK):
                    places = place + tl.arange(0, BK)
                    angles = table + (place - at + B * BLOCKS) * 2 * H
                    ka, kb, key_logs = window_tile(
                        k + place * k_far,
                        k_row,
                        length - place,
                        angles,
                        matrix,
                        low,
                        BK,
                        SOFTMAX,
                        ROTARY,
                        H,
                        DH,
                        PHI,
                    )
                    values = load_rows(v + place * v_far, v_row, length - place, BK, V - column, BV)
                    similar = products(qa, qb, ka, kb, PAIR, dtype)
                    key_logs = similar * SHARP if SOFTMAX else key_logs[None, :]
                    seen = (places[None, :] >= window[:, None]) & (places[None, :] <= rows[:, None])
                    weighed, shrink, top = weigh_window(key_logs, similar, top, seen, SOFTMAX, PHI.unbounded)
                    near = near * shrink[:, None] + dot(weighed, values, dtype)
                    den = den * shrink + tl.sum(weighed, 1)
                # Rows behind the last token have seen nothing.
                den = tl.where(inside, den, 1.0)

                qa, qb, own = phi(x, q_row, left, matrix, low, C, PHI)
                qa, qb = rounded(qa, dtype), rounded(qb, dtype)
                far = dot(qa, tile, dtype)
                far_den = tl.sum(qa.to(tl.float32) * norm[None, :], 1)
                if PHI.two:
                    far += dot(qb, tile2, dtype)
                    far_den += tl.sum(qb.to(tl.float32) * norm2[None, :], 1)
                far = tl.where(reads[:, None], far, 0.0)
                far_den = tl.where(reads, far_den, 0.0)

                places = group + g * length + at
                here = tl.arange(0, C)
                logit = tl.load(gate + places + here, mask=inside, other=0.0) if GATED else den
                extra = 0.0 if GATED else tl.load(far_weight + kv * G + g)
                # Beside a softmax, phi(q) counts with its own scale; elsewhere it cancels.
                far_log = r + own if (SOFTMAX and PHI.unbounded) else r
                total, of_far, level = joined(
                    near, den, top, far, far_den, far_log, logit, extra, GATED, SOFTMAX
                )
                store_rows(out + places * V + column, V, left, total, V - column, BV)
                if column == 0:
                    tl.store(factor + places + here, of_far, mask=inside)
                    if SOFTMAX:
                        tl.store(peak + places + here, level, mask=inside)
                    if PHI.unbounded:
                        # The same for all queries of a key.
                        own_scale = r if SOFTMAX else level
                        tl.store(scale + head.to(tl.int64) * length + rows, own_scale, mask=inside)

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
