"""Triton kernels of FLuRKA's outputs and of the gradients of its queries, through window and landmarks at once.

For query i, with the sums n_i = sum_j w_ij [v_j, 1] over its window and f_i = sum_s (phi(q_i).phi(k_s)) m_s [v_s, 1]
over landmarks,

    gated:   o_i = g_i n_i / den(n_i) + (1 - g_i) f_i / den(f_i)
    shared:  o_i = (n_i + exp(gamma) f_i) / (den(n_i) + exp(gamma) den(f_i))

Landmarks are keys of `kernel_attention.kernels`: a state in memory for those of earlier segments, pairs for those of
the query's segment. With the factor c_i of their sums (`Merged.factor`) and z_i, the gradient of their normalizer,

    dphi(q_i) = sum_s m_s (c_i do_i.v_s + z_i) phi(k_s)

Shared normalizer: z_i = -c_i do_i.o_i. Gated: the same with the landmarks' own mean f_i / den(f_i) for o_i.

Forward stores the spread of the two parts for backward: gated, the difference of their means n_i / den(n_i) and
f_i / den(f_i); shared, the landmarks' part of o_i less their share of the normalizer times o_i. Its product with do_i
and do_i.o_i give all means and the gradient of the gate or of gamma, with the rounding of a half precision output.
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.arguments import (
    angles,
    gamma_of,
    gate_of,
    gate_weight_of,
    window_start,
)
from megakernel.ops.flurka_attention.window_kernels import (
    level_of,
    near_factor,
    products,
    store_halves,
    turned,
    window_tile,
    window_weights,
)
from megakernel.ops.kernel_attention.arguments import (
    features_of_queries,
    head_at,
    load_numbers,
    matrix_of,
    queries_of_program,
    tile_rows,
)
from megakernel.ops.kernel_attention.kernels import largest_logs, store_features, sums_of_keys
from megakernel.ops.kernel_attention.query_kernels import across_features, do_of_keys, gradient_of_half
from megakernel.ops.kernels.features import (
    EMPTY,
    dot,
    exp,
    exp2,
    load_rows,
    once,
    phi,
    rounded,
    slope_of_half,
    store_rows,
    store_slope,
)


@triton.jit
def weigh_window(logs, pairs, top, visible, NEAR: tl.constexpr, PHI: tl.constexpr):
    """Online softmax step: weights of a tile of keys, rescaling factor of earlier sums, and the new running maximum.

    logs: under a softmax log2 of the weights (`pairs` is then unused), else log scales of the keys.
    """
    if NEAR.softmax:
        logs = tl.where(visible, logs, float("-inf"))
        larger = tl.maximum(top, tl.max(logs, 1))
        return exp2(logs - larger[:, None]), tl.exp2(top - larger), larger
    if PHI.unbounded:
        logs = tl.where(visible, logs, EMPTY)
        larger = tl.maximum(top, tl.max(logs, 1))
        return tl.where(visible, pairs * exp(logs - larger[:, None]), 0.0), tl.exp(top - larger), larger
    return tl.where(visible, pairs, 0.0), tl.zeros_like(top) + 1.0, top


@triton.jit
def merged_parts(
    near, den, top, far, far_den, far_log, gate, far_weight, LEAST: tl.constexpr, NEAR: tl.constexpr
):
    """Outputs, their spread, and `factor`, `lse` and `share` of each query; for a window under phi, lse is r.

    The sums over landmarks have the scale exp(far_log), without the far weight. If weights add up to less than LEAST,
    they count as 0; their factor is 0, and backward skips them.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    if NEAR.gated:
        share = tl.sigmoid(-gate)
        empty = tl.abs(far_den) < LEAST
        reciprocal = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, far_den))
        near *= (1.0 / den)[:, None]
        spread = near - far * reciprocal[:, None]
        return near - spread * share[:, None], spread, share * reciprocal, top + tl.log2(den), share
    if NEAR.softmax:
        far_log = tl.where(far_den < LEAST, EMPTY, (far_log + far_weight) * LOG2E)
        larger = tl.maximum(top, far_log)
        of_near, of_far = tl.exp2(top - larger), tl.exp2(far_log - larger)
        lse = larger + tl.log2(den * of_near + far_den * of_far)
        of_near, of_far = tl.exp2(top - lse), tl.exp2(far_log - lse)
        share = far_den * of_far
        far *= of_far[:, None]
        out = near * of_near[:, None] + far
        return out, far - out * share[:, None], of_far, lse, share
    larger = tl.maximum(top, far_log)
    of_near, of_far = tl.exp(top - larger), tl.exp(far_log + far_weight - larger)
    total = den * of_near + far_den * of_far
    empty = tl.abs(total) < LEAST
    reciprocal = tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, total))
    of_far *= reciprocal
    share = far_den * of_far
    far *= of_far[:, None]
    out = near * (of_near * reciprocal)[:, None] + far
    return out, far - out * share[:, None], reciprocal * tl.exp(far_weight), larger, share


@triton.jit
def merge(
    queries,
    window,
    keys,
    matrix,
    state,
    seq,
    shares,
    out,
    spread,
    merged,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, N, V), and for backward `merged` and, unless it is None, `spread` (B, H, N, V).

    Program: TILING.chunk queries of a head.
    """
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    q, left = tile_rows(queries, tile), tile.end - tile.at
    k, v = head_at(window.keys, tile.batch, tile.kv), head_at(window.v, tile.batch, tile.kv)
    dtype: tl.constexpr = q.dtype.element_ty
    projection = matrix_of(matrix, tile.kv, PHI)

    starts = window_start(window, seq, tile.batch, tile.rows, NEAR)
    oldest = tl.min(starts, 0)
    # Angles count from the oldest place that a window of this tile can reach.
    qa, qb, _logs = window_tile(
        q, queries.row, left, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
    )
    near = tl.zeros((C, VP), tl.float32)
    den = tl.zeros((C,), tl.float32)
    top = tl.full((C,), EMPTY if (NEAR.softmax or PHI.unbounded) else 0.0, tl.float32)
    for place in range(oldest, tile.stop, BK):
        places, first = place + tl.arange(0, BK), tl.cast(place + window.before, tl.int64)
        seat, count = place - tile.at + NEAR.reach, seq.length - place
        values = load_rows(v + first * window.v.row, window.v.row, count, BK, TILING.values, VP)
        ka, kb, key_logs = window_tile(
            k + first * window.keys.row,
            window.keys.row,
            count,
            window,
            seat,
            projection,
            matrix.low,
            BK,
            NEAR,
            PHI,
        )
        similar = products(qa, qb, ka, kb, dtype, NEAR, PHI)
        logs = similar * NEAR.sharp if NEAR.softmax else key_logs[None, :]
        seen = (places[None, :] >= starts[:, None]) & (places[None, :] <= tile.rows[:, None])
        weighed, shrink, top = weigh_window(logs, similar, top, seen, NEAR, PHI)
        near = near * shrink[:, None] + dot(weighed, values, dtype)
        den = den * shrink + tl.sum(weighed, 1)
    # Rows past the last token have seen no keys.
    inside = tile.rows < tile.end
    den = tl.where(inside, den, 1.0)

    x, y, own = phi(q, queries.row, left, projection, matrix.low, C, PHI)
    x, y = once(rounded(x, dtype)), once(rounded(y, dtype)) if PHI.two else x
    largest = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        largest = largest_logs(keys, seq, tile, TILING)
    far, far_den, r = sums_of_keys(x, y, keys, state, seq, tile, largest, None, TILING, PHI)
    numbers = tile.head.to(tl.int64) * seq.queries
    seats = numbers + tile.rows
    logit = den
    if NEAR.gated:
        logit = gate_of(shares, tile.head, tile.at, tile.first, seq.queries, C, NEAR)
        if shares.gate_weight is not None:
            weight = gate_weight_of(shares, tile.query_head, 0, PHI.width, PHI.padded_width, NEAR)
            token = load_rows(q, queries.row, left, C, PHI.width, PHI.padded_width)
            logit += tl.sum(token.to(tl.float32) * weight[None, :], 1)
            tl.store(merged.logit + seats, logit, mask=inside)
    extra = gamma_of(shares, tile.query_head)
    # The scale of phi(q) cancels, except against a softmax window.
    far_log = r + own if (NEAR.softmax and PHI.unbounded) else r
    if PHI.decays and not NEAR.gated:
        of_queries = seq.decay.of_queries + tile.key_head.to(tl.int64) * seq.queries
        far_log += load_numbers(of_queries, tile.at, tile.end, C)
    total, difference, factor, lse, share = merged_parts(
        near, den, top, far, far_den, far_log, logit, extra, PHI.least, NEAR
    )
    store_rows(tile_rows(out, tile), out.row, left, total, TILING.values, VP)
    if spread is not None:
        store_rows(tile_rows(spread, tile), spread.row, left, difference, TILING.values, VP)
    tl.store(merged.factor + seats, factor, mask=inside)
    if NEAR.softmax:
        tl.store(merged.lse + seats, lse, mask=inside)
    if not NEAR.gated:
        tl.store(merged.share + seats, share, mask=inside)
    if PHI.unbounded and tile.query_head % TILING.group == 0:
        # r is the same for all query heads of a key head.
        r = r if NEAR.softmax else lse
        tl.store(merged.scale + tile.key_head.to(tl.int64) * seq.queries + tile.rows, r, mask=inside)


@triton.jit
def window_slopes(
    halves,
    do,
    n,
    level,
    shift,
    window,
    matrix,
    seq,
    tile,
    starts,
    here,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """For queries (C,) and window keys (BK,) from `here` on: n_i w_ij do_i.v_j, ds_ij, and the keys' halves."""
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    dtype: tl.constexpr = do.dtype
    places, first = here + tl.arange(0, BK), tl.cast(here + window.before, tl.int64)
    k = head_at(window.keys, tile.batch, tile.kv) + first * window.keys.row
    v = head_at(window.v, tile.batch, tile.kv) + first * window.v.row
    seat, count = here - tile.at + NEAR.reach, seq.length - here
    projection = matrix_of(matrix, tile.kv, PHI)
    values = load_rows(v, window.v.row, count, BK, TILING.values, VP)
    ka, kb, logs = window_tile(k, window.keys.row, count, window, seat, projection, matrix.low, BK, NEAR, PHI)
    seen = (places[None, :] >= starts[:, None]) & (places[None, :] <= tile.rows[:, None])
    seen &= (tile.rows < tile.end)[:, None]
    similar = products(halves[0], halves[1], ka, kb, dtype, NEAR, PHI)
    weights, slopes = window_weights(similar, logs[None, :], level[:, None], seen, NEAR, PHI)
    towards = dot(do, tl.trans(values), dtype) * n[:, None]
    return weights * towards, slopes * (towards - shift[:, None]), ka, kb


@triton.jit
def merge_backward(
    queries,
    window,
    keys,
    matrix,
    state,
    seq,
    shares,
    merged,
    out,
    spread,
    dq,
    dy,
    means,
    change,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of queries (B, H, N, D), optionally of projected queries (..., M), z, and features.

    Also the means (B, H, N) of `window_kernels`, and `change` (B, H, N): the gradient of the gate's logits, or each
    query's part of the gradient of gamma. Programs as in `merge`.
    """
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    HP: tl.constexpr = NEAR.padded_half
    MP: tl.constexpr = PHI.padded_rows
    LEARNED: tl.constexpr = dy is not None
    tile = queries_of_program(seq, TILING)
    tokens = queries.tokens.rows
    q, left = tile_rows(tokens, tile), tile.end - tile.at
    dtype: tl.constexpr = q.dtype.element_ty
    inside = tile.rows < tile.end
    starts = window_start(window, seq, tile.batch, tile.rows, NEAR)
    oldest = tl.min(starts, 0)
    numbers = tile.head.to(tl.int64) * seq.queries
    seats = numbers + tile.rows
    projection = matrix_of(matrix, tile.kv, PHI)
    of_token = dq + (numbers + tile.at) * PHI.width
    of_projected = dy + (numbers + tile.at) * PHI.rows if LEARNED else None

    if queries.tokens.features is not None:
        fa, fb, own = phi(q, tokens.row, left, projection, matrix.low, C, PHI)
        fa, fb = rounded(fa, dtype), rounded(fb, dtype)
        store_features(fa, fb, own, queries.tokens, tile.head, seq.queries, tile.at, left, PHI)
        # Read back below; until then, the gradients need the registers.
        tl.debug_barrier()
    do = load_rows(tile_rows(queries.grad, tile), queries.grad.row, left, C, TILING.values, VP)
    factor = load_numbers(queries.reciprocal + numbers, tile.at, tile.end, C)
    n = near_factor(
        shares, queries.reciprocal, tile.head, tile.query_head, tile.at, tile.first, seq.queries, C, NEAR
    )
    level = level_of(merged, tile.head, tile.key_head, tile.at, seq.queries, C, NEAR, PHI)
    r = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        r = load_numbers(queries.scale + tile.key_head.to(tl.int64) * seq.queries, tile.at, tile.end, C)
    if NEAR.gated:
        share_of_far = tl.sigmoid(-gate_of(shares, tile.head, tile.at, tile.first, seq.queries, C, NEAR))
    if spread is None:
        # One key may have nearly all the weight, and terms then nearly cancel: the rounded output is too inexact.
        fa, fb, _own = features_of_queries(queries.tokens, seq, tile, TILING, PHI)
        of_far, den = do_of_keys(fa, fb, do, keys, state, seq, tile, r, TILING, PHI)
        qa, qb, _logs = window_tile(
            q, tokens.row, left, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
        )
        of_near = tl.zeros((C,), tl.float32)
        for here in range(oldest, tile.stop, BK):
            parts, _slopes, _ka, _kb = window_slopes(
                (qa, qb), do, n, level, of_near, window, matrix, seq, tile, starts, here, TILING, NEAR, PHI
            )
            of_near += tl.sum(parts, 1)
        if NEAR.gated:
            excess = tl.where(factor == 0, 0.0, of_far / tl.where(factor == 0, 1.0, den))
            mean = of_near
            moved = share_of_far * (of_near - n * excess)
        else:
            excess = of_near + of_far * factor
            mean = excess if NEAR.softmax else excess * n
            share = load_numbers(merged.share + numbers, tile.at, tile.end, C)
            moved = of_far * factor - share * excess
    else:
        o = load_rows(tile_rows(out, tile), out.row, left, C, TILING.values, VP)
        along_out = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        difference = load_rows(tile_rows(spread, tile), spread.row, left, C, TILING.values, VP)
        moved = tl.sum(difference.to(tl.float32) * do.to(tl.float32), 1)
        if NEAR.gated:
            excess = along_out - n * moved
            mean = n * (along_out + share_of_far * moved)
            moved *= share_of_far * n
        else:
            excess = along_out
            mean = excess if NEAR.softmax else excess * n
    tl.store(means + seats, mean, mask=inside)
    tl.store(queries.delta + seats, -factor * excess, mask=inside)
    tl.store(change + seats, rounded(moved, change.dtype.element_ty), mask=inside)

    slope = tl.zeros((C, MP), tl.float32)
    along = tl.zeros((C,), tl.float32)
    size = tl.zeros((C,), tl.float32)
    for half in tl.static_range(2 if PHI.two else 1):
        grad = gradient_of_half(half, do, -excess, r, keys, state, seq, tile, TILING, PHI) * factor[:, None]
        if not NEAR.softmax:
            qa, qb, _logs = window_tile(
                q, tokens.row, left, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
            )
            for here in range(oldest, tile.stop, BK):
                _parts, slopes, ka, kb = window_slopes(
                    (qa, qb), do, n, level, mean, window, matrix, seq, tile, starts, here, TILING, NEAR, PHI
                )
                grad += dot(slopes, kb if half else ka, dtype)
        fa, fb, _own = features_of_queries(queries.tokens, seq, tile, TILING, PHI)
        fa, fb = fa.to(tl.float32), fb.to(tl.float32)
        along += tl.sum(grad * (fb if half else fa), 1)
        size += tl.sum(fb * fb if half else fa * fa, 1)
        slope += slope_of_half(half, grad, fb if half else fa, fa if half else fb, PHI)
    if (NEAR.gated or not NEAR.softmax) and not PHI.two:
        # Outputs under phi alone do not depend on the length of phi(q), see `bwd_dq`.
        slope = across_features(slope, along, size, queries.tokens, seq, tile, TILING, PHI)
    store_slope(q, tokens.row, left, projection, slope, of_token, of_projected, C, LEARNED, PHI)

    if NEAR.softmax:
        # Add the parts of window and gate to the gradient stored above.
        tl.debug_barrier()
        qa, qb, _logs = window_tile(
            q, tokens.row, left, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
        )
        grad_a = tl.zeros((C, HP), tl.float32)
        grad_b = tl.zeros((C, HP), tl.float32)
        for here in range(oldest, tile.stop, BK):
            _parts, slopes, ka, kb = window_slopes(
                (qa, qb), do, n, level, mean, window, matrix, seq, tile, starts, here, TILING, NEAR, PHI
            )
            grad_a += dot(slopes, ka, dtype)
            grad_b += dot(slopes, kb, dtype)
        if NEAR.rotary:
            grad_a, grad_b = turned(grad_a, grad_b, angles(window, NEAR.reach, NEAR), NEAR, True)
        if shares.gate_weight is not None:
            weight_a = gate_weight_of(shares, tile.query_head, 0, NEAR.half, HP, NEAR)
            weight_b = gate_weight_of(shares, tile.query_head, NEAR.half, NEAR.width - NEAR.half, HP, NEAR)
            grad_a += moved[:, None] * weight_a[None, :]
            grad_b += moved[:, None] * weight_b[None, :]
        store_halves(of_token, grad_a, grad_b, left, True, NEAR)
