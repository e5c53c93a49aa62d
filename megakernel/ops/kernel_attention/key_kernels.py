"""Triton kernel of kernel attention's backward pass over keys: gradients of keys, values, key weights and priors."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.kernels import load_key_weights
from megakernel.ops.kernels.arguments import (
    head_ptr,
    load_features,
    load_half_of_state,
    load_vector,
    projection_ptr,
    tile_of_program,
    tiles_of,
    token_idx_of_keys,
    token_of,
)
from megakernel.ops.kernels.feature_maps import store_dx_from_dphi
from megakernel.ops.kernels.mixtures import store_dx_of_keys
from megakernel.ops.kernels.primitives import dot, load_rows, rounded, store_rows
from megakernel.ops.kernels.states import document_start


@triton.jit
def dphi_from_state(
    b_state, b_norm, b_v, state, entry, half: tl.constexpr, TILING: tl.constexpr, PHI: tl.constexpr
):
    """Gradients of features (C, MP): b_v (C, VP) times one half of a state, b_state (MP, VP), plus b_norm (MP,).

    If the state has higher precision than the values, a second product adds its rounding error, so that sums and
    normalizer cancel exactly. The state is loaded again; keeping it would exceed registers and shared memory.
    """
    dtype: tl.constexpr = b_v.dtype
    b_dphi = dot(b_v, tl.trans(b_state), dtype) + b_norm[None, :]
    if b_state.dtype != dtype:
        tl.debug_barrier()
        b_state, b_norm = load_half_of_state(state, entry, half, PHI, TILING.padded_values)
        b_dphi += dot(b_v, tl.trans(b_state - rounded(b_state, dtype).to(tl.float32)), dtype)
    return b_dphi


@triton.jit
def later_state_scale(k_idx, last, weights, k_log_scale, log, TILING: tl.constexpr, PHI: tl.constexpr):
    """(C,): each key's factor of the state of later segments' queries; 0 if it does not enter the outgoing state."""
    enters = (k_idx >= last) | (not TILING.causal)
    if PHI.unbounded:
        return tl.where(enters & (weights != 0), tl.exp(k_log_scale + log), 0.0)
    return tl.where(enters, 1.0, 0.0)


@triton.jit
def weigh_pairs_transposed(
    b_s, q_idx, first, k_idx, stop, k_log_scale, r, seq, TILING: tl.constexpr, PHI: tl.constexpr
):
    """Products (C, BQ) of keys and queries times relative scales; 0 where masked. See `kernels.pairs_of`.

    Queries from `stop` on see the keys through their state, so they are masked.
    """
    if PHI.unbounded:
        b_s *= tl.exp(tl.minimum(k_log_scale[:, None] - r[None, :], 0.0))
    if TILING.rank == 0:
        visible = k_idx[:, None] <= q_idx[None, :]
    else:
        visible = (k_idx[:, None] < q_idx[None, :]) & (q_idx < stop)[None, :]
    if seq.starts is not None:
        visible &= k_idx[:, None] >= first[None, :]
    return tl.where(visible, b_s, 0.0)


@triton.jit
def bwd_dkv(
    queries,
    keys,
    matrix,
    state,
    seq,
    dk,
    dv,
    p_dproj,
    dkey_weights,
    dpriors,
    TILING: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of keys, `Rows` (B, H_kv, N, D), of values, `Rows` (..., V), optionally of projected keys (..., M), key
    weights and priors.

    For mixtures, (B, H_kv, N, KEYS D), (KEYS, B, H_kv, N, M), and parts (B, H_kv, N, KEYS) of the gradient of priors.
    Without dk or dv, its products are skipped: for wide features, both do not fit into registers. `state` holds states
    of queries. Program: TILING.chunk keys of a key head.
    """
    C: tl.constexpr = TILING.chunk
    BQ: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    G: tl.constexpr = TILING.group
    head, at, _begin, end, segment = tile_of_program(seq.keys, TILING.span, C)
    batch, kv = head // seq.heads, head % seq.heads
    entry = head * tl.cdiv(seq.keys, TILING.span) + segment if TILING.causal else head
    offset = head.to(tl.int64) * seq.keys + at
    rows, num_valid = at + tl.arange(0, C), end - at
    k_idx = token_idx_of_keys(rows, seq, batch, TILING)
    stop = tl.minimum((segment + 1) * TILING.segment, seq.length)
    last = document_start(seq.starts, batch, stop - 1, seq.length, seq.start)
    weights = load_key_weights(keys.key_weights, head, at, seq.keys, end, C)
    b_k1, b_k2, k_log_scale = load_features(keys.tokens, batch, kv, seq.heads, seq.keys, end, at, C, PHI)
    p_v = head_ptr(keys.v, batch, kv) + tl.cast(at, tl.int64) * keys.v.row
    b_v = load_rows(p_v, keys.v.row, num_valid, C, TILING.values, VP)
    dtype: tl.constexpr = p_v.dtype.element_ty
    later_scale = later_state_scale(
        k_idx, last, weights, k_log_scale, tl.load(state.logs + entry), TILING, PHI
    )
    b_state, b_norm = load_half_of_state(state, entry, 0, PHI, VP)
    b_dnorm = tl.zeros((C,), tl.float32)
    if dv is not None:
        b_dv = dot(b_k1, b_state, dtype)
        b_dnorm = tl.sum(b_k1.to(tl.float32) * b_norm[None, :], 1)
        tl.debug_barrier()
    if dk is not None:
        b_dphi1 = dphi_from_state(b_state, b_norm, b_v, state, entry, 0, TILING, PHI) * later_scale[:, None]
        b_dphi2 = b_dphi1
    if PHI.has_two_halves:
        b_state, b_norm = load_half_of_state(state, entry, 1, PHI, VP)
        if dv is not None:
            b_dv += dot(b_k2, b_state, dtype)
            b_dnorm += tl.sum(b_k2.to(tl.float32) * b_norm[None, :], 1)
        if dk is not None:
            b_dphi2 = (
                dphi_from_state(b_state, b_norm, b_v, state, entry, 1, TILING, PHI) * later_scale[:, None]
            )
    if dv is not None:
        b_dv *= later_scale[:, None]
        b_dnorm *= later_scale
    if TILING.causal:
        for g in range(G):
            query_head = kv * G + g
            vec_offset = (head * G + g).to(tl.int64) * seq.queries
            for q_start in range(token_of(at, TILING), tl.minimum(stop, seq.queries), BQ):
                q_idx = q_start + tl.arange(0, BQ)
                first = document_start(seq.starts, batch, q_idx, seq.length, seq.start)
                r = tl.zeros((BQ,), tl.float32)
                if PHI.unbounded:
                    r = load_vector(queries.scale + head.to(tl.int64) * seq.queries, q_start, seq.queries, BQ)
                p_do = (
                    head_ptr(queries.grad, batch, query_head) + tl.cast(q_start, tl.int64) * queries.grad.row
                )
                b_do = load_rows(p_do, queries.grad.row, seq.queries - q_start, BQ, TILING.values, VP)
                reciprocal = load_vector(queries.reciprocal + vec_offset, q_start, seq.queries, BQ)
                delta = tl.zeros((BQ,), tl.float32)
                if queries.delta is not None:
                    delta = load_vector(queries.delta + vec_offset, q_start, seq.queries, BQ)
                b_q1, b_q2, _own = load_features(
                    queries.tokens,
                    batch,
                    query_head,
                    seq.heads * G,
                    seq.queries,
                    seq.queries,
                    q_start,
                    BQ,
                    PHI,
                )
                if dv is not None:
                    b_s = dot(b_k1, tl.trans(b_q1), dtype)
                    if PHI.has_two_halves:
                        b_s += dot(b_k2, tl.trans(b_q2), dtype)
                    b_s = weigh_pairs_transposed(
                        b_s, q_idx, first, k_idx, stop, k_log_scale, r, seq, TILING, PHI
                    )
                    if dkey_weights is not None:
                        b_dnorm += tl.sum(b_s * delta[None, :], 1)
                    b_dv += dot(b_s * reciprocal[None, :], b_do, dtype)
                if dk is not None:
                    b_dp = dot(b_v, tl.trans(b_do), dtype) * reciprocal[None, :] + delta[None, :]
                    b_dp = weigh_pairs_transposed(
                        b_dp, q_idx, first, k_idx, stop, k_log_scale, r, seq, TILING, PHI
                    )
                    b_dphi1 += dot(b_dp, b_q1, dtype)
                    if PHI.has_two_halves:
                        b_dphi2 += dot(b_dp, b_q2, dtype)
    if dv is not None:
        p_dv = head_ptr(dv, batch, kv) + tl.cast(at, tl.int64) * dv.row
        store_rows(p_dv, dv.row, num_valid, b_dv * weights[:, None], TILING.values, VP)
        if dkey_weights is not None:
            b_dweights = tl.sum(b_dv * b_v.to(tl.float32), 1) + b_dnorm
            tl.store(dkey_weights + offset + tl.arange(0, C), b_dweights, mask=rows < end)
    if dk is not None:
        b_dphi1 *= weights[:, None]
        b_dphi2 *= weights[:, None]
        tokens = keys.tokens.rows
        p_k = head_ptr(tokens, batch, kv) + tl.cast(at, tl.int64) * tokens.row
        p_dk = head_ptr(dk, batch, kv) + tl.cast(at, tl.int64) * dk.row
        projection = projection_ptr(matrix, kv, PHI)
        p_dproj_tile = None if p_dproj is None else p_dproj + offset * PHI.rows
        LEARNED: tl.constexpr = p_dproj is not None
        if TILING.keys == 0:
            store_dx_from_dphi(
                p_k,
                tokens.row,
                num_valid,
                projection,
                b_k1.to(tl.float32),
                b_k2.to(tl.float32),
                b_dphi1,
                b_dphi2,
                p_dk,
                dk.row,
                p_dproj_tile,
                C,
                LEARNED,
                PHI,
            )
        else:
            heads = tl.num_programs(0) // tiles_of(seq.keys, TILING.span, C)
            store_dx_of_keys(
                p_k,
                tokens.row,
                num_valid,
                projection,
                matrix.low,
                keys.priors + kv * TILING.keys,
                k_log_scale,
                b_dphi1,
                b_dphi2,
                p_dk,
                dk.row,
                p_dproj_tile,
                heads.to(tl.int64) * seq.keys * PHI.rows,
                dpriors + offset * TILING.keys,
                TILING.keys,
                C,
                LEARNED,
                PHI,
            )
