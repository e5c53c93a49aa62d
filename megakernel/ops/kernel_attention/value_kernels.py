"""Triton kernel of kernel attention's backward over keys: the gradients of values and masses."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.kernels import pulls
from megakernel.ops.kernel_attention.key_kernels import behind_factors, queries_of_keys, query_scales
from megakernel.ops.kernels.features import dot, load_rows, phi, rounded, store_rows
from megakernel.ops.kernels.mixtures import phi_of_keys
from megakernel.ops.kernels.states import (
    add_tokens,
    first_token,
    load_mass,
    load_state,
    scales_of_addition,
    share_of_program,
)


@triton.jit
def pull_values(
    q,
    k,
    v,
    grad,
    mass,
    starts,
    matrix,
    priors,
    sums,
    norms,
    logs,
    inverse,
    drift,
    scale,
    dv,
    dmass,
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
    start,
    heads,
    segments,
    states,
    low,
    tokens,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASSES: tl.constexpr,
    KEYS: tl.constexpr,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of values (B, H_kv, N, V) and parts of those of masses (blocks, B, H_kv, N).

    `sums` holds states of queries, and a program goes from right to left. tokens: B H_kv N, the rows of one part.
    """
    head, segment, block = share_of_program(segments, VP, BV)
    row, kv = head // heads, head % heads
    column = block * BV
    dtype: tl.constexpr = k.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    own = head.to(tl.int64) * length
    mass += own
    scale += own
    matrix += kv * PHI.rows * PHI.width
    priors += kv * KEYS
    group = head.to(tl.int64) * G * length
    part = block.to(tl.int64) * tokens + own
    entry = head.to(tl.int64) * (states + 1) + (segment if CAUSAL else states)
    FP: tl.constexpr = PHI.padded_features
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, PHI.padded_rows, VP, BV)
    if PHI.two:
        tile2, norm2 = load_state(sums, norms, column, 1, PHI.padded_rows, VP, BV)

    begin = segment * SEGMENT
    q_far, g_far = tl.cast(q_row, tl.int64), tl.cast(g_row, tl.int64)
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    chunks = tl.cdiv(tl.minimum(SEGMENT, length - begin), C)
    for step in range(chunks):
        at = begin + (chunks - 1 - step) * C
        rows, left = at + tl.arange(0, C), length - at
        last = first_token(starts, row, tl.minimum(at + C, length) - 1, length, start, PACKED)
        weights = load_mass(mass, rows, length, MASSES)
        keys = k + at * k_far
        a, b, scales = phi_of_keys(
            keys,
            k_row,
            left,
            matrix,
            low,
            priors,
            KEYS,
            C,
            PHI,
        )
        a, b = rounded(a, dtype), rounded(b, dtype)
        behind = behind_factors(rows, last, weights, scales, log, CAUSAL, PHI.unbounded)
        du = dot(a, tile, dtype)
        du_norm = tl.sum(a.to(tl.float32) * norm[None, :], 1)
        if PHI.two:
            du += dot(b, tile2, dtype)
            du_norm += tl.sum(b.to(tl.float32) * norm2[None, :], 1)
        du *= behind[:, None]
        du_norm *= behind
        if CAUSAL:
            first = first_token(starts, row, rows, length, start, PACKED)
            r, reads, added = query_scales(scale, rows, first, at, length, PHI.unbounded)
            shrink, factors, log = scales_of_addition(log, added, last < at, PHI.unbounded)
            factors = tl.where(reads, factors, 0.0)
            tile *= shrink
            norm *= shrink
            if PHI.two:
                tile2 *= shrink
                norm2 *= shrink
            for g in range(G):
                places = group + g * length + at
                given = grad + tl.cast(g, tl.int64) * g_head + at * g_far
                x = q + tl.cast(g, tl.int64) * q_head + at * q_far
                qa, qb, _ = phi(x, q_row, left, matrix, low, C, PHI)
                qa, qb = rounded(qa, dtype), rounded(qb, dtype)
                similar = dot(a, tl.trans(qa), dtype)
                if PHI.two:
                    similar += dot(b, tl.trans(qb), dtype)
                similar *= queries_of_keys(rows, first, weights, scales, r, length, PHI.unbounded)
                pull, pull_norm = pulls(
                    given, inverse + places, drift + places, g_row, left, C, V - column, BV, column == 0
                )
                du += dot(similar, pull, dtype)
                du_norm += tl.sum(similar * pull_norm[None, :], 1)
                pull *= factors[:, None]
                pull_norm *= factors
                tile, norm = add_tokens(tile, norm, 1.0, qa, pull, pull_norm, dtype)
                if PHI.two:
                    tile2, norm2 = add_tokens(tile2, norm2, 1.0, qb, pull, pull_norm, dtype)
        store_rows(dv + (own + at) * V + column, V, left, du * weights[:, None], V - column, BV)
        if MASSES:
            columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV)
            total = tl.sum(du * columns.to(tl.float32), 1) + tl.where(column == 0, du_norm, 0.0)
            tl.store(dmass + part + rows, total, mask=rows < length)
