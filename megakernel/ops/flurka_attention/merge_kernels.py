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

With an exchange, `window_forward` sums the windows of the first queries before the entering state has arrived, and
`window_dq` adds the windows' part of these queries' gradients while the gradient of that state is under way. Both have
the loops and tiles of `merge` and `merge_backward`, so the numbers do not depend on which kernel a tile is left to.
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.arguments import (
    angles_ptr,
    load_gamma,
    load_gate,
    load_gate_weight,
    load_window_sums,
    store_window_sums,
    window_start,
)
from megakernel.ops.flurka_attention.window_kernels import (
    apply_rotary,
    load_lse,
    near_factor,
    scores,
    store_halves,
    window_tile,
    window_weights,
)
from megakernel.ops.kernel_attention.kernels import max_log_scale, store_features, sums_of_keys
from megakernel.ops.kernel_attention.query_kernels import do_v_of_keys, dphi_of_half, orthogonal_to_features
from megakernel.ops.kernels.arguments import (
    head_ptr,
    load_features_of_queries,
    load_vector,
    projection_ptr,
    queries_of_program,
    tile_ptr,
)
from megakernel.ops.kernels.feature_maps import dproj_of_half, phi, store_dx
from megakernel.ops.kernels.primitives import (
    EMPTY,
    dot,
    exp,
    exp2,
    load_rows,
    materialize,
    rounded,
    store_rows,
)


@triton.jit
def online_softmax_step(logs, b_s, row_max, visible, NEAR: tl.constexpr, PHI: tl.constexpr):
    """Online softmax step: weights of a tile of keys, rescaling factor of earlier sums, and the new running maximum.

    logs: under a softmax log2 of the weights (`b_s` is then unused), else log scales of the keys.
    """
    if NEAR.softmax:
        logs = tl.where(visible, logs, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logs, 1))
        return exp2(logs - new_max[:, None]), tl.exp2(row_max - new_max), new_max
    if PHI.unbounded:
        logs = tl.where(visible, logs, EMPTY)
        new_max = tl.maximum(row_max, tl.max(logs, 1))
        return tl.where(visible, b_s * exp(logs - new_max[:, None]), 0.0), tl.exp(row_max - new_max), new_max
    return tl.where(visible, b_s, 0.0), tl.zeros_like(row_max) + 1.0, row_max


@triton.jit
def merge_parts(
    near, den, row_max, far, far_den, far_log, gate, far_weight, LEAST: tl.constexpr, NEAR: tl.constexpr
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
        return near - spread * share[:, None], spread, share * reciprocal, row_max + tl.log2(den), share
    if NEAR.softmax:
        far_log = tl.where(far_den < LEAST, EMPTY, (far_log + far_weight) * LOG2E)
        new_max = tl.maximum(row_max, far_log)
        of_near, of_far = tl.exp2(row_max - new_max), tl.exp2(far_log - new_max)
        lse = new_max + tl.log2(den * of_near + far_den * of_far)
        of_near, of_far = tl.exp2(row_max - lse), tl.exp2(far_log - lse)
        share = far_den * of_far
        far *= of_far[:, None]
        out = near * of_near[:, None] + far
        return out, far - out * share[:, None], of_far, lse, share
    new_max = tl.maximum(row_max, far_log)
    of_near, of_far = tl.exp(row_max - new_max), tl.exp(far_log + far_weight - new_max)
    total = den * of_near + far_den * of_far
    empty = tl.abs(total) < LEAST
    reciprocal = tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, total))
    of_far *= reciprocal
    share = far_den * of_far
    far *= of_far[:, None]
    out = near * (of_near * reciprocal)[:, None] + far
    return out, far - out * share[:, None], reciprocal * tl.exp(far_weight), new_max, share


@triton.jit
def window_sums(
    queries,
    window,
    matrix,
    seq,
    tile,
    ahead,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Sums (C, VP) over the windows of a tile of queries, their normalizer (C,) and running maximum (C,).

    ahead: `WindowSums`, which take the place of what they have; or None.
    """
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    p_q, num_valid = tile_ptr(queries, tile), tile.end - tile.at
    p_k, p_v = head_ptr(window.keys, tile.batch, tile.kv), head_ptr(window.v, tile.batch, tile.kv)
    dtype: tl.constexpr = p_q.dtype.element_ty
    projection = projection_ptr(matrix, tile.kv, PHI)
    starts = window_start(window, seq, tile.batch, tile.rows, NEAR)
    begin = tl.min(starts, 0)
    # Angles count from the oldest place that a window of this tile can reach.
    b_q1, b_q2, _logs = window_tile(
        p_q, queries.row, num_valid, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
    )
    near = tl.zeros((C, VP), tl.float32)
    den = tl.zeros((C,), tl.float32)
    row_max = tl.full((C,), EMPTY if (NEAR.softmax or PHI.unbounded) else 0.0, tl.float32)
    if ahead is not None:
        near, den, row_max = load_window_sums(ahead, near, den, row_max, tile, TILING)
        begin = tl.where(tile.at < ahead.tokens, tile.stop, begin)
    for k_start in range(begin, tile.stop, BK):
        k_idx, row_idx = k_start + tl.arange(0, BK), tl.cast(k_start + window.before, tl.int64)
        table_row, num_keys = k_start - tile.at + NEAR.reach, seq.length - k_start
        b_v = load_rows(p_v + row_idx * window.v.row, window.v.row, num_keys, BK, TILING.values, VP)
        b_k1, b_k2, key_logs = window_tile(
            p_k + row_idx * window.keys.row,
            window.keys.row,
            num_keys,
            window,
            table_row,
            projection,
            matrix.low,
            BK,
            NEAR,
            PHI,
        )
        b_s = scores(b_q1, b_q2, b_k1, b_k2, dtype, NEAR, PHI)
        logs = b_s * NEAR.softmax_scale_log2 if NEAR.softmax else key_logs[None, :]
        mask = (k_idx[None, :] >= starts[:, None]) & (k_idx[None, :] <= tile.rows[:, None])
        b_p, scale_old, row_max = online_softmax_step(logs, b_s, row_max, mask, NEAR, PHI)
        near = near * scale_old[:, None] + dot(b_p, b_v, dtype)
        den = den * scale_old + tl.sum(b_p, 1)
    return near, den, row_max


@triton.jit
def window_forward(
    queries, window, matrix, seq, ahead, TILING: tl.constexpr, NEAR: tl.constexpr, PHI: tl.constexpr
):
    """`WindowSums` of queries. Programs as in `merge`."""
    tile = queries_of_program(seq, TILING)
    near, den, row_max = window_sums(queries, window, matrix, seq, tile, None, TILING, NEAR, PHI)
    store_window_sums(ahead, near, den, row_max, tile, TILING)


@triton.jit
def merge(
    queries,
    window,
    keys,
    matrix,
    state,
    seq,
    merge_params,
    out,
    spread,
    merged,
    ahead,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, N, V), and for backward `merged` and, unless it is None, `spread` (B, H, N, V).

    ahead: `WindowSums` of the first queries, or None. Program: TILING.chunk queries of a head.
    """
    C: tl.constexpr = TILING.chunk
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    p_q, num_valid = tile_ptr(queries, tile), tile.end - tile.at
    dtype: tl.constexpr = p_q.dtype.element_ty
    projection = projection_ptr(matrix, tile.kv, PHI)

    near, den, row_max = window_sums(queries, window, matrix, seq, tile, ahead, TILING, NEAR, PHI)
    # Rows past the last token have seen no keys.
    inside = tile.rows < tile.end
    den = tl.where(inside, den, 1.0)

    b_phi1, b_phi2, q_log_scale = phi(p_q, queries.row, num_valid, projection, matrix.low, C, PHI)
    b_phi1, b_phi2 = (
        materialize(rounded(b_phi1, dtype)),
        materialize(rounded(b_phi2, dtype)) if PHI.has_two_halves else b_phi1,
    )
    largest = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        largest = max_log_scale(keys, seq, tile, TILING)
    far, far_den, r = sums_of_keys(b_phi1, b_phi2, keys, state, seq, tile, largest, None, TILING, PHI)
    vec_offset = tile.head.to(tl.int64) * seq.queries
    vec_idx = vec_offset + tile.rows
    logit = den
    if NEAR.gated:
        logit = load_gate(merge_params, tile.head, tile.at, tile.first, seq.queries, C, NEAR)
        if merge_params.gate_weight is not None:
            b_gate_weight = load_gate_weight(
                merge_params, tile.query_head, 0, PHI.width, PHI.padded_width, NEAR
            )
            b_q = load_rows(p_q, queries.row, num_valid, C, PHI.width, PHI.padded_width)
            logit += tl.sum(b_q.to(tl.float32) * b_gate_weight[None, :], 1)
            tl.store(merged.logit + vec_idx, logit, mask=inside)
    gamma = load_gamma(merge_params, tile.query_head)
    # The scale of phi(q) cancels, except against a softmax window.
    far_log = r + q_log_scale if (NEAR.softmax and PHI.unbounded) else r
    if PHI.decays and not NEAR.gated:
        of_queries = seq.decay.of_queries + tile.key_head.to(tl.int64) * seq.queries
        far_log += load_vector(of_queries, tile.at, tile.end, C)
    b_o, b_spread, factor, lse, share = merge_parts(
        near, den, row_max, far, far_den, far_log, logit, gamma, PHI.least, NEAR
    )
    store_rows(tile_ptr(out, tile), out.row, num_valid, b_o, TILING.values, VP)
    if spread is not None:
        store_rows(tile_ptr(spread, tile), spread.row, num_valid, b_spread, TILING.values, VP)
    tl.store(merged.factor + vec_idx, factor, mask=inside)
    if NEAR.softmax:
        tl.store(merged.lse + vec_idx, lse, mask=inside)
    if not NEAR.gated:
        tl.store(merged.share + vec_idx, share, mask=inside)
    if PHI.unbounded and tile.query_head % TILING.group == 0:
        # r is the same for all query heads of a key head.
        r = r if NEAR.softmax else lse
        tl.store(merged.scale + tile.key_head.to(tl.int64) * seq.queries + tile.rows, r, mask=inside)


@triton.jit
def window_ds(
    b_q,
    b_do,
    n,
    lse,
    mean,
    window,
    matrix,
    seq,
    tile,
    starts,
    k_start,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """For queries (C,) and window keys (BK,) from `k_start` on: n_i w_ij do_i.v_j, ds_ij, and the keys' halves."""
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    dtype: tl.constexpr = b_do.dtype
    k_idx, row_idx = k_start + tl.arange(0, BK), tl.cast(k_start + window.before, tl.int64)
    p_k = head_ptr(window.keys, tile.batch, tile.kv) + row_idx * window.keys.row
    p_v = head_ptr(window.v, tile.batch, tile.kv) + row_idx * window.v.row
    table_row, num_keys = k_start - tile.at + NEAR.reach, seq.length - k_start
    projection = projection_ptr(matrix, tile.kv, PHI)
    b_v = load_rows(p_v, window.v.row, num_keys, BK, TILING.values, VP)
    b_k1, b_k2, logs = window_tile(
        p_k, window.keys.row, num_keys, window, table_row, projection, matrix.low, BK, NEAR, PHI
    )
    mask = (k_idx[None, :] >= starts[:, None]) & (k_idx[None, :] <= tile.rows[:, None])
    mask &= (tile.rows < tile.end)[:, None]
    b_s = scores(b_q[0], b_q[1], b_k1, b_k2, dtype, NEAR, PHI)
    b_p, b_ds = window_weights(b_s, logs[None, :], lse[:, None], mask, NEAR, PHI)
    b_dp = dot(b_do, tl.trans(b_v), dtype) * n[:, None]
    return b_p * b_dp, b_ds * (b_dp - mean[:, None]), b_k1, b_k2


@triton.jit
def add_window_dq(
    p_q,
    q_row,
    b_do,
    n,
    lse,
    mean,
    b_dgate,
    window,
    matrix,
    seq,
    merge_params,
    tile,
    starts,
    p_dq,
    dq_row,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Add the parts of a softmax window and of the gate to the stored gradients of a tile's queries."""
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    HP: tl.constexpr = NEAR.padded_half
    dtype: tl.constexpr = p_q.dtype.element_ty
    num_valid = tile.end - tile.at
    projection = projection_ptr(matrix, tile.kv, PHI)
    b_q1, b_q2, _logs = window_tile(
        p_q, q_row, num_valid, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
    )
    b_dq1 = tl.zeros((C, HP), tl.float32)
    b_dq2 = tl.zeros((C, HP), tl.float32)
    for k_start in range(tl.min(starts, 0), tile.stop, BK):
        _pdp, b_ds, b_k1, b_k2 = window_ds(
            (b_q1, b_q2),
            b_do,
            n,
            lse,
            mean,
            window,
            matrix,
            seq,
            tile,
            starts,
            k_start,
            TILING,
            NEAR,
            PHI,
        )
        b_dq1 += dot(b_ds, b_k1, dtype)
        b_dq2 += dot(b_ds, b_k2, dtype)
    if NEAR.rotary:
        b_dq1, b_dq2 = apply_rotary(b_dq1, b_dq2, angles_ptr(window, NEAR.reach, NEAR), NEAR, True)
    if merge_params.gate_weight is not None:
        weight_a = load_gate_weight(merge_params, tile.query_head, 0, NEAR.half, HP, NEAR)
        weight_b = load_gate_weight(
            merge_params, tile.query_head, NEAR.half, NEAR.width - NEAR.half, HP, NEAR
        )
        b_dq1 += b_dgate[:, None] * weight_a[None, :]
        b_dq2 += b_dgate[:, None] * weight_b[None, :]
    store_halves(p_dq, dq_row, b_dq1, b_dq2, num_valid, True, NEAR)


@triton.jit
def merge_backward(
    queries,
    window,
    keys,
    matrix,
    state,
    seq,
    merge_params,
    merged,
    out,
    spread,
    dq,
    p_dproj,
    means,
    dgate,
    later,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of queries, `Rows` (B, H, N, D), optionally of projected queries (..., M), z, and features.

    Also the means (B, H, N) of `window_kernels`, and `dgate` (B, H, N): the gradient of the gate's logits, or each
    query's part of the gradient of gamma. later: queries before this place are left to `window_dq`; None leaves none.
    Programs as in `merge`.
    """
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    MP: tl.constexpr = PHI.padded_rows
    LEARNED: tl.constexpr = p_dproj is not None
    tile = queries_of_program(seq, TILING)
    tokens = queries.tokens.rows
    p_q, num_valid = tile_ptr(tokens, tile), tile.end - tile.at
    dtype: tl.constexpr = p_q.dtype.element_ty
    inside = tile.rows < tile.end
    starts = window_start(window, seq, tile.batch, tile.rows, NEAR)
    oldest = tl.min(starts, 0)
    vec_offset = tile.head.to(tl.int64) * seq.queries
    vec_idx = vec_offset + tile.rows
    projection = projection_ptr(matrix, tile.kv, PHI)
    p_dq = tile_ptr(dq, tile)
    p_dproj_tile = p_dproj + (vec_offset + tile.at) * PHI.rows if LEARNED else None

    if queries.tokens.features is not None:
        b_phi1, b_phi2, q_log_scale = phi(p_q, tokens.row, num_valid, projection, matrix.low, C, PHI)
        b_phi1, b_phi2 = rounded(b_phi1, dtype), rounded(b_phi2, dtype)
        store_features(
            b_phi1, b_phi2, q_log_scale, queries.tokens, tile.head, seq.queries, tile.at, num_valid, PHI
        )
        # Read back below; until then, the gradients need the registers.
        tl.debug_barrier()
    b_do = load_rows(tile_ptr(queries.grad, tile), queries.grad.row, num_valid, C, TILING.values, VP)
    factor = load_vector(queries.reciprocal + vec_offset, tile.at, tile.end, C)
    n = near_factor(
        merge_params,
        queries.reciprocal,
        tile.head,
        tile.query_head,
        tile.at,
        tile.first,
        seq.queries,
        C,
        NEAR,
    )
    lse = load_lse(merged, tile.head, tile.key_head, tile.at, seq.queries, C, NEAR, PHI)
    r = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        r = load_vector(queries.scale + tile.key_head.to(tl.int64) * seq.queries, tile.at, tile.end, C)
    if NEAR.gated:
        far_share = tl.sigmoid(-load_gate(merge_params, tile.head, tile.at, tile.first, seq.queries, C, NEAR))
    if spread is None:
        # One key may have nearly all the weight, and terms then nearly cancel: the rounded output is too inexact.
        b_phi1, b_phi2, _own = load_features_of_queries(queries.tokens, seq, tile, TILING, PHI)
        far_do_v, den = do_v_of_keys(b_phi1, b_phi2, b_do, keys, state, seq, tile, r, TILING, PHI)
        b_q1, b_q2, _logs = window_tile(
            p_q, tokens.row, num_valid, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
        )
        near_do_v = tl.zeros((C,), tl.float32)
        for k_start in range(oldest, tile.stop, BK):
            b_pdp, _ds, _k1, _k2 = window_ds(
                (b_q1, b_q2),
                b_do,
                n,
                lse,
                near_do_v,
                window,
                matrix,
                seq,
                tile,
                starts,
                k_start,
                TILING,
                NEAR,
                PHI,
            )
            near_do_v += tl.sum(b_pdp, 1)
        if NEAR.gated:
            far_do_mean = tl.where(factor == 0, 0.0, far_do_v / tl.where(factor == 0, 1.0, den))
            mean = near_do_v
            b_dgate = far_share * (near_do_v - n * far_do_mean)
        else:
            far_do_mean = near_do_v + far_do_v * factor
            mean = far_do_mean if NEAR.softmax else far_do_mean * n
            share = load_vector(merged.share + vec_offset, tile.at, tile.end, C)
            b_dgate = far_do_v * factor - share * far_do_mean
    else:
        b_o = load_rows(tile_ptr(out, tile), out.row, num_valid, C, TILING.values, VP)
        do_dot_o = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
        b_spread = load_rows(tile_ptr(spread, tile), spread.row, num_valid, C, TILING.values, VP)
        b_dgate = tl.sum(b_spread.to(tl.float32) * b_do.to(tl.float32), 1)
        if NEAR.gated:
            far_do_mean = do_dot_o - n * b_dgate
            mean = n * (do_dot_o + far_share * b_dgate)
            b_dgate *= far_share * n
        else:
            far_do_mean = do_dot_o
            mean = far_do_mean if NEAR.softmax else far_do_mean * n
    tl.store(means + vec_idx, mean, mask=inside)
    tl.store(queries.delta + vec_idx, -factor * far_do_mean, mask=inside)
    tl.store(dgate + vec_idx, rounded(b_dgate, dgate.dtype.element_ty), mask=inside)

    dproj = tl.zeros((C, MP), tl.float32)
    dphi_dot_phi = tl.zeros((C,), tl.float32)
    phi_norm_sq = tl.zeros((C,), tl.float32)
    for half in tl.static_range(2 if PHI.has_two_halves else 1):
        b_dphi = (
            dphi_of_half(half, b_do, -far_do_mean, r, keys, state, seq, tile, TILING, PHI) * factor[:, None]
        )
        if not NEAR.softmax:
            b_q1, b_q2, _logs = window_tile(
                p_q, tokens.row, num_valid, window, NEAR.reach, projection, matrix.low, C, NEAR, PHI
            )
            for k_start in range(oldest, tile.stop, BK):
                _pdp, b_ds, b_k1, b_k2 = window_ds(
                    (b_q1, b_q2),
                    b_do,
                    n,
                    lse,
                    mean,
                    window,
                    matrix,
                    seq,
                    tile,
                    starts,
                    k_start,
                    TILING,
                    NEAR,
                    PHI,
                )
                b_dphi += dot(b_ds, b_k2 if half else b_k1, dtype)
        b_phi1, b_phi2, _own = load_features_of_queries(queries.tokens, seq, tile, TILING, PHI)
        b_phi1, b_phi2 = b_phi1.to(tl.float32), b_phi2.to(tl.float32)
        dphi_dot_phi += tl.sum(b_dphi * (b_phi2 if half else b_phi1), 1)
        phi_norm_sq += tl.sum(b_phi2 * b_phi2 if half else b_phi1 * b_phi1, 1)
        dproj += dproj_of_half(half, b_dphi, b_phi2 if half else b_phi1, b_phi1 if half else b_phi2, PHI)
    if (NEAR.gated or not NEAR.softmax) and not PHI.has_two_halves:
        # Outputs under phi alone do not depend on the length of phi(q), see `bwd_dq`.
        dproj = orthogonal_to_features(
            dproj, dphi_dot_phi, phi_norm_sq, queries.tokens, seq, tile, TILING, PHI
        )
    store_dx(p_q, tokens.row, num_valid, projection, dproj, p_dq, dq.row, p_dproj_tile, C, LEARNED, PHI)

    if NEAR.softmax:
        # Rows of dq are stored above, and read again.
        tl.debug_barrier()
        now = True
        if later is not None:
            now = tile.at >= later
        if now:
            add_window_dq(
                p_q,
                tokens.row,
                b_do,
                n,
                lse,
                mean,
                b_dgate,
                window,
                matrix,
                seq,
                merge_params,
                tile,
                starts,
                p_dq,
                dq.row,
                TILING,
                NEAR,
                PHI,
            )


@triton.jit
def window_dq(
    queries,
    window,
    matrix,
    seq,
    merge_params,
    merged,
    do,
    factor,
    means,
    dgate,
    dq,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """What `merge_backward` has left out of the gradients `dq` of the first `seq.queries` of `seq.length` queries.

    factor: that of `merge_backward`'s queries; dgate: float32, read if the gate has a part of queries. For softmax
    windows. Programs as in `merge`.
    """
    C: tl.constexpr = TILING.chunk
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    starts = window_start(window, seq, tile.batch, tile.rows, NEAR)
    # Vectors have all queries.
    row = tile.head.to(tl.int64) * seq.length
    b_do = load_rows(tile_ptr(do, tile), do.row, tile.end - tile.at, C, TILING.values, VP)
    n = near_factor(
        merge_params, factor, tile.head, tile.query_head, tile.at, tile.first, seq.length, C, NEAR
    )
    lse = load_lse(merged, tile.head, tile.key_head, tile.at, seq.length, C, NEAR, PHI)
    mean = load_vector(means + row, tile.at, seq.length, C)
    b_dgate = mean
    if merge_params.gate_weight is not None:
        b_dgate = load_vector(dgate + row, tile.at, seq.length, C)
    add_window_dq(
        tile_ptr(queries, tile),
        queries.row,
        b_do,
        n,
        lse,
        mean,
        b_dgate,
        window,
        matrix,
        seq,
        merge_params,
        tile,
        starts,
        tile_ptr(dq, tile),
        dq.row,
        TILING,
        NEAR,
        PHI,
    )
