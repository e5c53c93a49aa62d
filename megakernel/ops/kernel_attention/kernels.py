"""Triton kernels of kernel attention's forward pass, and device functions that all its kernels share.

Memory holds one state per segment of a few hundred tokens, never one per chunk. One launch sums each segment's keys, a
small one (`states.pass_states`) scans these sums into the states that enter the segments, and the last one computes
outputs: a program holds a tile of queries with all of their values. Queries read the state in one matrix product, and
the keys of their own segment as explicit pairs. With u_j = m_j [v_j, 1] and g_i = [do_i, -do_i.o_i] / den_i, the
gradient of the sums of query i (normalized; otherwise [do_i, 0]):

    dphi(q_i) = sum_j (g_i.u_j) phi(k_j)    dphi(k_j) = sum_i (g_i.u_j) phi(q_i)    du_j = sum_i (phi(q_i).phi(k_j)) g_i

so dQ (`query_kernels`) needs the state of earlier keys, and dK (`key_kernels`) the same sum over later queries: a
state of queries, whose values are the g_i. The second part of g_i is delta_i, the gradient of the denominator, which
makes the g_i.u_j of a normalized query add up to 0 under its weights.

Unbounded maps: phi(k_j) = values exp(c_j). Query i divides by exp(r_i), with r_i the largest c_j of the keys it sees,
so later keys do not affect it, not even its rounding. The query's own scale cancels in the quotient. A state of queries
has the log scales -r_i.

Features of maps with a projection, and of mixtures, are stored in memory, because several programs read each of them.
The launch that sums keys writes theirs; the first launch of backward writes those of queries.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.arguments import (
    first_key,
    head_ptr,
    keys_before,
    load_features,
    load_half_of_state,
    load_vector,
    projection_ptr,
    queries_of_program,
    store_half_of_state,
    tile_ptr,
    token_idx_of_keys,
)
from megakernel.ops.kernels.feature_maps import phi
from megakernel.ops.kernels.mixtures import phi_of_keys
from megakernel.ops.kernels.primitives import EMPTY, dot, exp, load_rows, materialize, rounded, store_rows
from megakernel.ops.kernels.states import add_tokens, document_start, empty_norm, largest_of, sum_of_norm


@triton.jit
def load_key_weights(key_weights, head, at, length, end, C: tl.constexpr):
    """Key weights (C,) float32 of a head of `length`, starting at key `at`; 0 from key `end` on."""
    if key_weights is None:
        weights = tl.where(at + tl.arange(0, C) < end, 1.0, 0.0)
    else:
        weights = load_vector(key_weights + head.to(tl.int64) * length, at, end, C)
    return weights


@triton.jit
def store_features(phi1, phi2, logs, tokens, head, length, at, num_valid, PHI: tl.constexpr):
    """Store the features of the first `num_valid` tokens of a tile, for `load_features` to load."""
    offset = head.to(tl.int64) * length + at
    rows = tl.arange(0, phi1.shape[0])
    features = tokens.features + offset * PHI.padded_features
    store_rows(features, PHI.padded_features, num_valid, phi1, PHI.padded_rows, PHI.padded_rows)
    if PHI.has_two_halves:
        features2 = features + PHI.padded_rows
        store_rows(features2, PHI.padded_features, num_valid, phi2, PHI.padded_rows, PHI.padded_rows)
    if PHI.unbounded:
        tl.store(tokens.logs + offset + rows, logs, mask=rows < num_valid)


@triton.jit
def sums_of_segment(
    keys, seq, batch, kv, begin, end, last, log, half: tl.constexpr, TILING: tl.constexpr, PHI: tl.constexpr
):
    """One half of the sum of a segment's keys, for a state of log scale `log`: sums (MP, VP), normalizer (MP,)."""
    MP: tl.constexpr = PHI.padded_rows
    VP: tl.constexpr = TILING.padded_values
    C: tl.constexpr = TILING.chunk
    head = batch * seq.heads + kv
    p_v = head_ptr(keys.v, batch, kv)
    b_state = tl.zeros((MP, VP), tl.float32)
    dtype: tl.constexpr = p_v.dtype.element_ty
    b_norm = empty_norm(MP, dtype)
    for at in range(begin, end, C):
        row_offset = tl.cast(at, tl.int64) * keys.v.row
        b_v = load_rows(p_v + row_offset, keys.v.row, end - at, C, TILING.values, VP)
        b_k1, b_k2, logs = load_features(keys.tokens, batch, kv, seq.heads, seq.keys, end, at, C, PHI)
        weights = load_key_weights(keys.key_weights, head, at, seq.keys, end, C)
        weights = tl.where(token_idx_of_keys(at + tl.arange(0, C), seq, batch, TILING) >= last, weights, 0.0)
        if PHI.unbounded:
            # The scale of a key with weight 0 may exceed `log`, which is the largest of the others.
            weights *= exp(tl.minimum(logs - log, 0.0))
        ones = tl.full((C,), 1.0, tl.float32)
        b_state, b_norm = add_tokens(b_state, b_norm, b_k2 if half else b_k1, weights, b_v, ones, dtype)
    return b_state, sum_of_norm(b_norm, dtype)


@triton.jit
def largest_of_document(left, left_starts, right, right_starts):
    """Combine function of a running maximum that restarts at document starts."""
    return tl.where(right_starts, right, tl.maximum(left, right)), left_starts | right_starts


@triton.jit
def write_keys(keys, matrix, state, seq, scale, TILING: tl.constexpr, PHI: tl.constexpr):
    """Sum the keys of each segment, and store their features. Program: one segment of a key head.

    For unbounded maps, also store in `scale` (B, H_kv, N) the largest log scale that each query sees in its segment.
    """
    VP: tl.constexpr = TILING.padded_values
    C: tl.constexpr = TILING.chunk
    segments = tl.cdiv(seq.keys, TILING.span)
    head, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    batch, kv = head // seq.heads, head % seq.heads
    begin = segment * TILING.span
    end = tl.minimum(begin + TILING.span, seq.keys)
    final = tl.minimum((segment + 1) * TILING.segment, seq.length) - 1
    last = document_start(seq.starts, batch, final, seq.length, seq.start)
    log = EMPTY if PHI.unbounded else 0.0
    if keys.tokens.features is not None:
        # First all features, then all sums: both at once would not fit into registers.
        p_k = head_ptr(keys.tokens.rows, batch, kv)
        dtype: tl.constexpr = keys.v.pointer.dtype.element_ty
        projection = projection_ptr(matrix, kv, PHI)
        priors = None if keys.priors is None else keys.priors + kv * TILING.keys
        largest = EMPTY
        for at in range(begin, end, C):
            rows = at + tl.arange(0, C)
            p_x = p_k + tl.cast(at, tl.int64) * keys.tokens.rows.row
            b_k1, b_k2, logs = phi_of_keys(
                p_x, keys.tokens.rows.row, end - at, projection, matrix.low, priors, TILING.keys, C, PHI
            )
            if PHI.decays:
                logs -= load_vector(seq.decay.of_keys + head.to(tl.int64) * seq.keys, at, end, C)
            b_k1, b_k2 = (
                materialize(rounded(b_k1, dtype)),
                materialize(rounded(b_k2, dtype)) if PHI.has_two_halves else b_k1,
            )
            store_features(b_k1, b_k2, logs, keys.tokens, head, seq.keys, at, end - at, PHI)
            if PHI.unbounded:
                logs = tl.where(
                    load_key_weights(keys.key_weights, head, at, seq.keys, end, C) != 0, logs, EMPTY
                )
                k_idx = token_idx_of_keys(rows, seq, batch, TILING)
                log = tl.maximum(log, largest_of(tl.where(k_idx >= last, logs, EMPTY)))
                if scale is not None:
                    first = document_start(seq.starts, batch, rows, seq.length, seq.start)
                    seen, _starts = tl.associative_scan((logs, first == rows), 0, largest_of_document)
                    r = tl.maximum(tl.where(first < at, largest, EMPTY), seen)
                    tl.store(scale + head.to(tl.int64) * seq.keys + rows, r, mask=rows < end)
                    largest = largest_of(tl.where(rows == tl.minimum(at + C, end) - 1, r, EMPTY))
        tl.debug_barrier()
    entry = tl.program_id(0)
    b_state, b_norm = sums_of_segment(keys, seq, batch, kv, begin, end, last, log, 0, TILING, PHI)
    store_half_of_state(b_state, b_norm, state, entry, 0, PHI, VP)
    if PHI.has_two_halves:
        b_state, b_norm = sums_of_segment(keys, seq, batch, kv, begin, end, last, log, 1, TILING, PHI)
        store_half_of_state(b_state, b_norm, state, entry, 1, PHI, VP)
    tl.store(state.logs + entry, log)


@triton.jit
def visible_keys(k_start, seq, tile, TILING: tl.constexpr):
    """(C, BK) mask: the query sees this key, of those starting at `k_start`."""
    k_idx = token_idx_of_keys(k_start + tl.arange(0, TILING.block), seq, tile.batch, TILING)[None, :]
    visible = k_idx <= tile.rows[:, None] if TILING.rank == 0 else k_idx < tile.rows[:, None]
    if seq.starts is not None:
        visible &= k_idx >= tile.first[:, None]
    return visible


@triton.jit
def max_log_scale(keys, seq, tile, TILING: tl.constexpr):
    """(C,): the largest log scale of the keys that each query sees in its segment."""
    BK: tl.constexpr = TILING.block
    r = tl.full((TILING.chunk,), EMPTY, tl.float32)
    for k_start in range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK):
        k_log_scale = load_vector(
            keys.tokens.logs + tile.key_head.to(tl.int64) * seq.keys, k_start, seq.keys, BK
        )
        exists = load_key_weights(keys.key_weights, tile.key_head, k_start, seq.keys, seq.keys, BK) != 0
        k_log_scale = tl.where(exists, k_log_scale, EMPTY)
        r = tl.maximum(
            r, tl.max(tl.where(visible_keys(k_start, seq, tile, TILING), k_log_scale[None, :], EMPTY), 1)
        )
    return r


@triton.jit
def weigh_pairs(b_s, keys, k_start, k_log_scale, r, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr):
    """Products (C, BK) of queries and keys times key weights and relative scales; 0 where masked."""
    if PHI.unbounded:
        # The scale of a key that is masked or has weight 0 may exceed r.
        b_s *= exp(tl.minimum(k_log_scale[None, :] - r[:, None], 0.0))
    if keys.key_weights is not None:
        b_s *= load_key_weights(keys.key_weights, tile.key_head, k_start, seq.keys, seq.keys, TILING.block)[
            None, :
        ]
    return tl.where(visible_keys(k_start, seq, tile, TILING), b_s, 0.0)


@triton.jit
def entering_state_scale(tile, log, r, TILING: tl.constexpr, PHI: tl.constexpr):
    """(C,): the factors by which queries scale the state that enters their segment; 0 if they do not see it."""
    reads = (tile.first < tile.begin) | (not TILING.causal)
    if PHI.unbounded:
        reads = reads & (r > EMPTY)
        return tl.where(reads, tl.exp(tl.minimum(log - r, 0.0)), 0.0)
    return tl.where(reads, 1.0, 0.0)


@triton.jit
def sums_of_keys(b_q1, b_q2, keys, state, seq, tile, largest, b_do, TILING: tl.constexpr, PHI: tl.constexpr):
    """Sums (C, VP) and normalizers (C,) of queries with features b_q1, b_q2, and r, the log scale of both.

    They run over the keys in the entering state and, if TILING.causal, the segment's keys before tile.stop. For
    unbounded maps, `largest` (C,) are the largest log scales that the queries see in the segment. Given do (C, VP), for
    maps with one half, the sums are (C,), of do_i.v_j, with unrounded weights: backward's terms
    w_ij (do_i.v_j - mean_i) must add up to 0.
    """
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    p_v = head_ptr(keys.v, tile.batch, tile.kv)
    dtype: tl.constexpr = p_v.dtype.element_ty
    b_state, b_norm = load_half_of_state(state, tile.entry, 0, PHI, VP)
    total = (
        dot(b_q1, b_state, dtype)
        if b_do is None
        else tl.sum(b_q1.to(tl.float32) * dot(b_do, tl.trans(b_state), dtype), 1)
    )
    den = tl.sum(b_q1.to(tl.float32) * b_norm[None, :], 1)
    if PHI.has_two_halves:
        b_state, b_norm = load_half_of_state(state, tile.entry, 1, PHI, VP)
        total += dot(b_q2, b_state, dtype)
        den += tl.sum(b_q2.to(tl.float32) * b_norm[None, :], 1)
    log = tl.load(state.logs + tile.entry)
    r = tl.zeros((C,), tl.float32) + log
    if TILING.causal and PHI.unbounded:
        r = tl.maximum(tl.where(tile.first < tile.begin, r, EMPTY), largest)
    state_scale = entering_state_scale(tile, log, r, TILING, PHI)
    total *= state_scale[:, None] if b_do is None else state_scale
    den *= state_scale
    if TILING.causal:
        # Reduced over threads after the loop.
        total_of_pairs = tl.zeros((C, BK), tl.float32)
        den_of_pairs = tl.zeros((C, BK), tl.float32)
        for k_start in range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK):
            row_offset = tl.cast(k_start, tl.int64) * keys.v.row
            b_v = load_rows(p_v + row_offset, keys.v.row, seq.keys - k_start, BK, TILING.values, VP)
            b_k1, b_k2, k_log_scale = load_features(
                keys.tokens, tile.batch, tile.kv, seq.heads, seq.keys, seq.keys, k_start, BK, PHI
            )
            b_s = dot(b_q1, tl.trans(b_k1), dtype)
            if PHI.has_two_halves:
                b_s += dot(b_q2, tl.trans(b_k2), dtype)
            b_s = weigh_pairs(b_s, keys, k_start, k_log_scale, r, seq, tile, TILING, PHI)
            if b_do is None:
                # Rounded before both sums, so that the mean of a single value is exactly that value.
                b_s = rounded(b_s, dtype)
                total += dot(b_s, b_v, dtype)
                den += tl.sum(b_s.to(tl.float32), 1)
            else:
                total_of_pairs += b_s * dot(b_do, tl.trans(b_v), dtype)
                den_of_pairs += b_s
        if b_do is not None:
            total += tl.sum(total_of_pairs, 1)
            den += tl.sum(den_of_pairs, 1)
    return total, den, r


@triton.jit
def read(
    queries,
    keys,
    matrix,
    state,
    seq,
    out,
    reciprocal,
    scale,
    log_mass,
    TILING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, N, V), and for backward 1 / den (B, H, N) and, for unbounded maps, r (B, H_kv, N), float32.

    If a query's weights add up to less than PHI.least, its output and its 1 / den are 0, and backward skips it.
    Without NORMALIZE, 1 / den is the factor of the sums, exp(r_i + log of the query's scale). If TILING.causal, `state`
    has one entry per segment, otherwise a single one of all keys. log_mass: with NORMALIZE, (B, H, N) float32 for the
    log of the sum of a query's weights, EMPTY if it is 0; None if not needed. Program: TILING.chunk queries of a head.
    """
    C: tl.constexpr = TILING.chunk
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    p_q, num_valid = tile_ptr(queries, tile), tile.end - tile.at
    dtype: tl.constexpr = p_q.dtype.element_ty

    b_q1, b_q2, q_log_scale = phi(
        p_q, queries.row, num_valid, projection_ptr(matrix, tile.kv, PHI), matrix.low, C, PHI
    )
    b_q1, b_q2 = (
        materialize(rounded(b_q1, dtype)),
        materialize(rounded(b_q2, dtype)) if PHI.has_two_halves else b_q1,
    )
    scale_offset = tile.key_head.to(tl.int64) * seq.queries
    largest = tl.zeros((C,), tl.float32)
    if PHI.unbounded and TILING.causal:
        if TILING.rank == 0:
            # Another query head of this key head may already have stored r here; the maximum below is then still r.
            largest = load_vector(scale + scale_offset, tile.at, tile.end, C)
        else:
            largest = max_log_scale(keys, seq, tile, TILING)
    total, den, r = sums_of_keys(b_q1, b_q2, keys, state, seq, tile, largest, None, TILING, PHI)
    if NORMALIZE:
        empty = tl.abs(den) < PHI.least
        factor = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, den))
    else:
        if PHI.decays:
            q_log_scale += load_vector(seq.decay.of_queries + scale_offset, tile.at, tile.end, C)
        factor = tl.exp(q_log_scale + r) if PHI.unbounded else tl.full((C,), 1.0, tl.float32)
    vec_offset = tile.head.to(tl.int64) * seq.queries
    if log_mass is not None:
        logs = r + q_log_scale if PHI.unbounded else r
        if PHI.decays:
            logs += load_vector(seq.decay.of_queries + scale_offset, tile.at, tile.end, C)
        logs = tl.where(empty, EMPTY, logs + tl.log(tl.where(empty, 1.0, den)))
        tl.store(log_mass + vec_offset + tile.rows, logs, mask=tile.rows < tile.end)
    store_rows(tile_ptr(out, tile), out.row, num_valid, total * factor[:, None], TILING.values, VP)
    tl.store(reciprocal + vec_offset + tile.rows, factor, mask=tile.rows < tile.end)
    if PHI.unbounded and tile.query_head % TILING.group == 0:
        tl.store(scale + scale_offset + tile.rows, r, mask=tile.rows < tile.end)
