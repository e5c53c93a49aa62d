"""Triton kernels of kernel attention's backward over queries: the state of queries, and their gradients."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.kernels import pair_factors, pull_of_state, pulls, visible_pairs
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_gradient
from megakernel.ops.kernels.mixtures import phi_of_keys
from megakernel.ops.kernels.states import (
    add_tokens,
    first_token,
    load_mass,
    load_state,
    scales_of_addition,
    share_of_program,
    store_state,
)


@triton.jit
def write_queries(
    q,
    grad,
    inverse,
    drift,
    scale,
    starts,
    matrix,
    sums,
    norms,
    logs,
    q_batch,
    q_head,
    q_row,
    g_batch,
    g_head,
    g_row,
    length,
    start,
    heads,
    segments,
    low,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    PHI: tl.constexpr,
):
    """What each segment's queries add to the gradient of the state that enters it.

    As `states.write_keys`, for queries that see that state.
    """
    MP: tl.constexpr = PHI.padded_rows
    head, segment, block = share_of_program(segments, VP, BV)
    row, kv = head // heads, head % heads
    column = block * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head
    matrix += kv * PHI.rows * PHI.width
    group = head.to(tl.int64) * G * length
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, length)
    q_far, g_far = tl.cast(q_row, tl.int64), tl.cast(g_row, tl.int64)

    tile = tl.zeros((MP, BV), tl.float32)
    tile2 = tile
    norm = tl.zeros((MP,), tl.float32)
    norm2 = norm
    log = EMPTY if PHI.unbounded else 0.0
    for at in range(begin, end, C):
        rows, left = at + tl.arange(0, C), length - at
        first = first_token(starts, row, rows, length, start, PACKED)
        reads = ((first < begin) | (not CAUSAL)) & (rows < length)
        scales = tl.zeros((C,), tl.float32)
        if PHI.unbounded:
            r = tl.load(scale + head.to(tl.int64) * length + rows, mask=rows < length, other=EMPTY)
            reads = reads & (r > EMPTY)
            scales = tl.where(reads, -r, EMPTY)
        shrink, factors, log = scales_of_addition(log, scales, True, PHI.unbounded)
        tile *= shrink
        norm *= shrink
        if PHI.two:
            tile2 *= shrink
            norm2 *= shrink
        factors = tl.where(reads, factors, 0.0)
        for g in range(G):
            places = group + g * length + at
            given = grad + tl.cast(g, tl.int64) * g_head + at * g_far
            pull, of_norm = pulls(
                given + column, inverse + places, drift + places, g_row, left, C, V - column, BV, column == 0
            )
            x = q + tl.cast(g, tl.int64) * q_head + at * q_far
            a, b, _ = phi(x, q_row, left, matrix, low, C, PHI)
            pull *= factors[:, None]
            of_norm *= factors
            tile, norm = add_tokens(tile, norm, 1.0, rounded(a, dtype), pull, of_norm, dtype)
            if PHI.two:
                tile2, norm2 = add_tokens(tile2, norm2, 1.0, rounded(b, dtype), pull, of_norm, dtype)
    entry = head.to(tl.int64) * (segments + 1) + segment
    FP: tl.constexpr = PHI.padded_features
    sums += entry * FP * VP
    norms += entry * FP
    store_state(tile, norm, sums, norms, column, 0, PHI.padded_rows, VP, BV)
    if PHI.two:
        store_state(tile2, norm2, sums, norms, column, 1, PHI.padded_rows, VP, BV)
    if column == 0:
        tl.store(logs + entry, log)


@triton.jit
def pull_queries(
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
    out,
    inverse,
    drift,
    dq,
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
    length,
    start,
    heads,
    segments,
    states,
    low,
    tokens,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LEARNED: tl.constexpr,
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
    """Gradient of queries (blocks, B, H, N, D), a part for each block of values, and of projected ones (..., M).

    With NORMALIZE also the parts of the drifts -do.o / den, (blocks, B, H, N). tokens: B H N, the rows of one part.
    """
    head, segment, block = share_of_program(segments, VP, BV)
    row, kv = head // heads, head % heads
    column = block * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    mass += head.to(tl.int64) * length
    matrix += kv * PHI.rows * PHI.width
    priors += kv * KEYS
    group = head.to(tl.int64) * G * length
    part = block.to(tl.int64) * tokens + group
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
    end = tl.minimum(begin + SEGMENT, length)
    for at in range(begin, end, C):
        rows, left = at + tl.arange(0, C), length - at
        first = first_token(starts, row, rows, length, start, PACKED)
        visible, reads = visible_pairs(rows, first, at, CAUSAL)
        if CAUSAL:
            columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV)
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
            weights = load_mass(mass, rows, length, MASSES)
        else:
            weights = tl.zeros((C,), tl.float32)
            scales = weights
        pairs, of_state, _ = pair_factors(scales, weights, visible, reads, log, PHI.unbounded)
        for g in range(G):
            places = group + g * length + at
            given = grad + tl.cast(g, tl.int64) * g_head + at * g_far
            here = tl.arange(0, C)
            inv = tl.load(inverse + places + here, mask=here < left, other=0.0)
            pull = load_rows(given, g_row, left, C, V - column, BV).to(tl.float32) * inv[:, None]
            of_norm = tl.zeros((C,), tl.float32)
            if NORMALIZE:
                outputs = load_rows(out + places * V + column, V, left, C, V - column, BV)
                of_norm -= tl.sum(pull * outputs.to(tl.float32), 1)
            seen = pull * of_state[:, None]
            seen_norm = of_norm * of_state
            grad_a = pull_of_state(tile, norm, seen, seen_norm, dtype)
            grad_b = grad_a
            if PHI.two:
                grad_b = pull_of_state(tile2, norm2, seen, seen_norm, dtype)
            if CAUSAL:
                along = dot(pull, tl.trans(columns), dtype) + of_norm[:, None]
                along *= pairs * weights[None, :]
                along = tl.trans(rounded(along, dtype))
                grad_a += dot(tl.trans(a), along, dtype)
                if PHI.two:
                    grad_b += dot(tl.trans(b), along, dtype)
            x = q + tl.cast(g, tl.int64) * q_head + at * q_far
            qa, qb, _ = phi(x, q_row, left, matrix, low, C, PHI)
            if NORMALIZE:
                # A quotient does not depend on the length of phi(q): its gradient stands across phi(q). With a drift
                # from the rounded `out` it does not quite, which shows where few keys make up a sum. The drift with
                # which it does is the one that keys need too.
                excess = tl.sum(tl.trans(rounded(qa, dtype)).to(tl.float32) * grad_a, 0)
                if PHI.two:
                    excess += tl.sum(tl.trans(rounded(qb, dtype)).to(tl.float32) * grad_b, 0)
                excess *= inv
                tl.store(drift + part + g * length + at + here, of_norm - excess, mask=here < left)
                of_excess = (excess * of_state)[None, :]
                grad_a -= norm[:, None] * of_excess
                if PHI.two:
                    grad_b -= norm2[:, None] * of_excess
                if CAUSAL:
                    along = tl.trans(rounded(pairs * weights[None, :] * excess[:, None], dtype))
                    grad_a -= dot(tl.trans(a), along, dtype)
                    if PHI.two:
                        grad_b -= dot(tl.trans(b), along, dtype)
            grad_a, grad_b = tl.trans(grad_a), tl.trans(grad_b)
            store_gradient(
                x,
                q_row,
                left,
                matrix,
                qa,
                qb,
                grad_a,
                grad_b,
                dq + (part + g * length + at) * PHI.width,
                dy + (part + g * length + at) * PHI.rows,
                C,
                LEARNED,
                PHI,
            )
        if CAUSAL:
            last = first_token(starts, row, tl.minimum(at + C, length) - 1, length, start, PACKED)
            written = tl.where(rows >= last, weights, 0.0)
            scales = tl.where(written != 0, scales, EMPTY) if PHI.unbounded else scales
            shrink, factors, log = scales_of_addition(log, scales, last < at, PHI.unbounded)
            written *= factors
            added = columns.to(tl.float32) * written[:, None]
            tile, norm = add_tokens(tile, norm, shrink, a, added, written, dtype)
            if PHI.two:
                tile2, norm2 = add_tokens(tile2, norm2, shrink, b, added, written, dtype)
