"""Triton kernels of kernel attention's backward pass over queries: their gradients, and states of queries."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.kernels import (
    entering_state_scale,
    store_features,
    sums_of_keys,
    weigh_pairs,
)
from megakernel.ops.kernels.arguments import (
    first_key,
    head_ptr,
    keys_before,
    load_features,
    load_features_of_queries,
    load_half_of_state,
    load_vector,
    projection_ptr,
    queries_of_program,
    store_half_of_state,
    tile_ptr,
)
from megakernel.ops.kernels.feature_maps import dproj_of_half, phi, store_dx
from megakernel.ops.kernels.primitives import EMPTY, dot, load_rows, rounded
from megakernel.ops.kernels.states import add_tokens, document_start, empty_norm, rescale_factors, sum_of_norm


@triton.jit
def do_v_of_keys(b_q1, b_q2, b_do, keys, state, seq, tile, r, TILING: tl.constexpr, PHI: tl.constexpr):
    """Weighted sums (C,) of do_i.v_j over what queries with features b_q1, b_q2 see, and of the weights; log scale r.

    Recomputed where the rounded output is too inexact: one key may have nearly all the weight, and its terms nearly
    cancel. For unbounded maps the weights are not rounded either.
    """
    if PHI.unbounded and not PHI.has_two_halves:
        total, den, _r = sums_of_keys(b_q1, b_q2, keys, state, seq, tile, r, b_do, TILING, PHI)
    else:
        b_o, den, _r = sums_of_keys(b_q1, b_q2, keys, state, seq, tile, r, None, TILING, PHI)
        total = tl.sum(b_o * b_do.to(tl.float32), 1)
    return total, den


@triton.jit
def dphi_of_half(
    half: tl.constexpr, b_do, delta, r, keys, state, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr
):
    """One half (C, MP) of sum_j m_j (do_i.v_j + delta_i) phi(k_j); arguments as in `sums_of_keys`."""
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    p_v = head_ptr(keys.v, tile.batch, tile.kv)
    dtype: tl.constexpr = p_v.dtype.element_ty
    state_scale = entering_state_scale(tile, tl.load(state.logs + tile.entry), r, TILING, PHI)
    b_state, b_norm = load_half_of_state(state, tile.entry, half, PHI, VP)
    b_dphi = (state_scale * delta)[:, None] * b_norm[None, :]
    b_dphi += dot(b_do, tl.trans(b_state), dtype) * state_scale[:, None]
    if TILING.causal:
        for k_start in range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK):
            row_offset = tl.cast(k_start, tl.int64) * keys.v.row
            b_v = load_rows(p_v + row_offset, keys.v.row, seq.keys - k_start, BK, TILING.values, VP)
            b_k1, b_k2, k_log_scale = load_features(
                keys.tokens, tile.batch, tile.kv, seq.heads, seq.keys, seq.keys, k_start, BK, PHI
            )
            b_dp = tl.zeros((C, BK), tl.float32) + delta[:, None] + dot(b_do, tl.trans(b_v), dtype)
            b_dp = weigh_pairs(b_dp, keys, k_start, k_log_scale, r, seq, tile, TILING, PHI)
            b_dphi += dot(b_dp, b_k2 if half else b_k1, dtype)
    return b_dphi


@triton.jit
def orthogonal_to_features(
    dproj, dphi_dot_phi, phi_norm_sq, tokens, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr
):
    """Correct `dproj` so that the gradient is orthogonal to the features; their dot product is now `dphi_dot_phi`.

    For maps with one half, whose features have the squared length `phi_norm_sq`. Features are loaded again, because the
    loops need the registers.
    """
    tl.debug_barrier()
    b_phi, _b, _own = load_features_of_queries(tokens, seq, tile, TILING, PHI)
    share = (dphi_dot_phi / tl.where(phi_norm_sq == 0, 1.0, phi_norm_sq))[:, None]
    b_phi = b_phi.to(tl.float32)
    return dproj - dproj_of_half(0, b_phi * share, b_phi, b_phi, PHI)


@triton.jit
def bwd_dq(
    queries,
    keys,
    matrix,
    state,
    seq,
    out,
    shift,
    dq,
    p_dproj,
    TILING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of queries, `Rows` (B, H, N, D), optionally of projected queries (..., M), delta, and features.

    Terms have the factor do_i.v_j - mean_i. Unless the map is unbounded, mean_i is do_i.o_i, of the rounded output, as
    in kernels of softmax: states in bfloat16 round no less. shift: (B, H, N) float32 that is added to the means, for
    outputs that are a part of a sum under one normalizer; None is 0. Programs as in `kernels.read`.
    """
    C: tl.constexpr = TILING.chunk
    MP: tl.constexpr = PHI.padded_rows
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    tokens = queries.tokens.rows
    p_q, num_valid = tile_ptr(tokens, tile), tile.end - tile.at
    dtype: tl.constexpr = p_q.dtype.element_ty
    vec_offset = tile.head.to(tl.int64) * seq.queries
    offset = vec_offset + tile.at
    projection = projection_ptr(matrix, tile.kv, PHI)

    if queries.tokens.features is not None:
        b_q1, b_q2, q_log_scale = phi(p_q, tokens.row, num_valid, projection, matrix.low, C, PHI)
        b_q1, b_q2 = rounded(b_q1, dtype), rounded(b_q2, dtype)
        store_features(
            b_q1, b_q2, q_log_scale, queries.tokens, tile.head, seq.queries, tile.at, num_valid, PHI
        )
        # Read back below; until then, the gradients need the registers.
        tl.debug_barrier()
    b_do = load_rows(tile_ptr(queries.grad, tile), queries.grad.row, num_valid, C, TILING.values, VP)
    reciprocal = load_vector(queries.reciprocal + vec_offset, tile.at, seq.queries, C)
    r = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        scales = queries.scale + tile.key_head.to(tl.int64) * seq.queries
        r = load_vector(scales, tile.at, seq.queries, C)
    mean = tl.zeros((C,), tl.float32)
    if NORMALIZE:
        if PHI.unbounded:
            b_q1, b_q2, _own = load_features_of_queries(queries.tokens, seq, tile, TILING, PHI)
            total, den = do_v_of_keys(b_q1, b_q2, b_do, keys, state, seq, tile, r, TILING, PHI)
            mean = tl.where(reciprocal == 0, 0.0, total / tl.where(reciprocal == 0, 1.0, den))
        else:
            b_o = load_rows(tile_ptr(out, tile), out.row, num_valid, C, TILING.values, VP)
            mean = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
        if shift is not None:
            mean += load_vector(shift + vec_offset, tile.at, seq.queries, C)
        tl.store(queries.delta + vec_offset + tile.rows, -mean * reciprocal, mask=tile.rows < tile.end)
    dproj = tl.zeros((C, MP), tl.float32)
    dphi_dot_phi = tl.zeros((C,), tl.float32)
    phi_norm_sq = tl.zeros((C,), tl.float32)
    for half in tl.static_range(2 if PHI.has_two_halves else 1):
        # Divide by den after the sums: 1 / den is small, and dO / den would have few digits in float16.
        b_dphi = dphi_of_half(half, b_do, -mean, r, keys, state, seq, tile, TILING, PHI) * reciprocal[:, None]
        b_q1, b_q2, _own = load_features_of_queries(queries.tokens, seq, tile, TILING, PHI)
        b_q1, b_q2 = b_q1.to(tl.float32), b_q2.to(tl.float32)
        dphi_dot_phi += tl.sum(b_dphi * (b_q2 if half else b_q1), 1)
        phi_norm_sq += tl.sum(b_q2 * b_q2 if half else b_q1 * b_q1, 1)
        dproj += dproj_of_half(half, b_dphi, b_q2 if half else b_q1, b_q1 if half else b_q2, PHI)
    if NORMALIZE and shift is None and not PHI.has_two_halves:
        # Quotients do not depend on the length of phi(q). With two halves, the error is below rounding.
        dproj = orthogonal_to_features(
            dproj, dphi_dot_phi, phi_norm_sq, queries.tokens, seq, tile, TILING, PHI
        )
    p_dproj_tile = None if p_dproj is None else p_dproj + offset * PHI.rows
    LEARNED: tl.constexpr = p_dproj is not None
    p_dq = tile_ptr(dq, tile)
    store_dx(p_q, tokens.row, num_valid, projection, dproj, p_dq, dq.row, p_dproj_tile, C, LEARNED, PHI)


@triton.jit
def sums_of_queries(
    queries, seq, batch, kv, begin, stop, half: tl.constexpr, TILING: tl.constexpr, PHI: tl.constexpr
):
    """One half of the sum of a segment's queries: sums (MP, VP), normalizer (MP,), log scale of both."""
    MP: tl.constexpr = PHI.padded_rows
    VP: tl.constexpr = TILING.padded_values
    C: tl.constexpr = TILING.chunk
    G: tl.constexpr = TILING.group
    head = batch * seq.heads + kv
    dtype: tl.constexpr = queries.grad.pointer.dtype.element_ty
    b_state = tl.zeros((MP, VP), tl.float32)
    b_norm = empty_norm(MP, dtype)
    log = EMPTY if PHI.unbounded else 0.0
    for at in range(begin, stop, C):
        rows, num_valid = at + tl.arange(0, C), stop - at
        first = document_start(seq.starts, batch, rows, seq.length, seq.start)
        reads = ((first < begin) | (not TILING.causal)) & (rows < stop)
        scales = tl.zeros((C,), tl.float32)
        if PHI.unbounded:
            r = tl.load(queries.scale + head.to(tl.int64) * seq.queries + rows, mask=rows < stop, other=EMPTY)
            reads = reads & (r > EMPTY)
            scales = tl.where(reads, -r, EMPTY)
        scale_old, factors, log = rescale_factors(log, scales, True, PHI.unbounded)
        b_state *= scale_old
        b_norm *= scale_old
        factors = tl.where(reads, factors, 0.0)
        for g in range(G):
            query_head = kv * G + g
            vec_offset = (head * G + g).to(tl.int64) * seq.queries
            p_do = head_ptr(queries.grad, batch, query_head) + tl.cast(at, tl.int64) * queries.grad.row
            b_do = load_rows(p_do, queries.grad.row, num_valid, C, TILING.values, VP)
            reciprocal = load_vector(queries.reciprocal + vec_offset, at, seq.queries, C)
            minus_mean = tl.zeros((C,), tl.float32)
            if queries.delta is not None:
                delta = load_vector(queries.delta + vec_offset, at, seq.queries, C)
                minus_mean = delta / tl.where(reciprocal == 0, 1.0, reciprocal)
            b_q1, b_q2, _own = load_features(
                queries.tokens, batch, query_head, seq.heads * G, seq.queries, stop, at, C, PHI
            )
            weights = reciprocal * factors
            b_state, b_norm = add_tokens(
                b_state, b_norm, b_q2 if half else b_q1, weights, b_do, minus_mean, dtype
            )
    return b_state, sum_of_norm(b_norm, dtype), log


@triton.jit
def write_queries(queries, state, seq, TILING: tl.constexpr, PHI: tl.constexpr):
    """Sum the queries of each segment into a state of queries. Program: one segment of a key head."""
    VP: tl.constexpr = TILING.padded_values
    segments = tl.cdiv(seq.queries, TILING.segment)
    head, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    batch, kv = head // seq.heads, head % seq.heads
    begin = segment * TILING.segment
    stop = tl.minimum(begin + TILING.segment, seq.queries)
    entry = tl.program_id(0)
    # One half after the other: both would not fit into the registers of four warps.
    for half in tl.static_range(2 if PHI.has_two_halves else 1):
        b_state, b_norm, log = sums_of_queries(queries, seq, batch, kv, begin, stop, half, TILING, PHI)
        store_half_of_state(b_state, b_norm, state, entry, half, PHI, VP)
    tl.store(state.logs + entry, log)
