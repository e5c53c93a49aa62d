"""Triton kernel of kernel attention's backward over keys: their gradients, and those of priors."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.kernels import pull_of_state, pulls
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded
from megakernel.ops.kernels.mixtures import MOST_KEYS, phi_of_keys, store_gradients_of_keys
from megakernel.ops.kernels.states import (
    add_tokens,
    first_token,
    load_mass,
    load_state,
    scales_of_addition,
    share_of_program,
)


@triton.jit
def behind_factors(rows, last, weights, scales, log, CAUSAL: tl.constexpr, UNBOUNDED: tl.constexpr):
    """Factors (C,) of the state of queries behind a chunk: they see the keys that enter the state that leaves it."""
    enters = (rows >= last) | (not CAUSAL)
    if UNBOUNDED:
        return tl.where(enters & (weights != 0), tl.exp(scales + log), 0.0)
    return tl.where(enters, 1.0, 0.0)


@triton.jit
def query_scales(scale, rows, first, at, length, UNBOUNDED: tl.constexpr):
    """r of the queries of a chunk, which of them see the state that enters it, and their log scales in a state."""
    reads = (first < at) & (rows < length)
    if UNBOUNDED:
        r = tl.load(scale + rows, mask=rows < length, other=EMPTY)
        reads = reads & (r > EMPTY)
        return r, reads, tl.where(reads, -r, EMPTY)
    r = tl.zeros((rows.shape[0],), tl.float32)
    return r, reads, r


@triton.jit
def queries_of_keys(rows, first, weights, scales, r, length, UNBOUNDED: tl.constexpr):
    """Factors of the pairs (keys, queries) of a chunk; 0 where a query does not see the key."""
    visible = (rows[:, None] <= rows[None, :]) & (rows[:, None] >= first[None, :])
    if UNBOUNDED:
        exists = visible & (weights != 0)[:, None] & (rows < length)[None, :]
        return tl.where(exists, tl.exp(tl.minimum(scales[:, None] - r[None, :], 0.0)), 0.0)
    return tl.where(visible, 1.0, 0.0)


@triton.jit
def pull_keys(
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
    dk,
    dy,
    dpriors,
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
    """Gradient of keys (blocks, B, H_kv, N, D), a part for each block of values, and of projected ones (..., M).

    Of mixtures (blocks, B, H_kv, N, KEYS D), (blocks, KEYS, B, H_kv, N, M), and parts (programs, KEYS) of the gradient
    of their priors. As `value_kernels.pull_values`, with half of its products: the two would not fit into registers.
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
    pack_keys = tl.cast(tokens, tl.int64)
    EACH: tl.constexpr = KEYS if KEYS > 0 else 1
    dk += (block * pack_keys + own) * EACH * PHI.width
    dy += (block * pack_keys * EACH + own) * PHI.rows
    shares = tl.zeros((MOST_KEYS,), tl.float32)
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
        scales = tl.zeros((C,), tl.float32)
        if PHI.unbounded:
            _a, _b, scales = phi_of_keys(
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
        weighed = weights * behind_factors(rows, last, weights, scales, log, CAUSAL, PHI.unbounded)
        columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV)
        lifted = columns.to(tl.float32) * weighed[:, None]
        # The normalizer is in the first block alone.
        of_norm = tl.where(column == 0, weighed, 0.0)
        grad_a = pull_of_state(tile, norm, lifted, of_norm, dtype)
        grad_b = grad_a
        if PHI.two:
            grad_b = pull_of_state(tile2, norm2, lifted, of_norm, dtype)
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
                pull, pull_norm = pulls(
                    given, inverse + places, drift + places, g_row, left, C, V - column, BV, column == 0
                )
                along = dot(columns, tl.trans(pull), dtype) + pull_norm[None, :]
                along *= (
                    queries_of_keys(rows, first, weights, scales, r, length, PHI.unbounded) * weights[:, None]
                )
                x = q + tl.cast(g, tl.int64) * q_head + at * q_far
                qa, qb, _ = phi(x, q_row, left, matrix, low, C, PHI)
                qa, qb = rounded(qa, dtype), rounded(qb, dtype)
                along = tl.trans(rounded(along, dtype))
                grad_a += dot(tl.trans(qa), along, dtype)
                if PHI.two:
                    grad_b += dot(tl.trans(qb), along, dtype)
                pull *= factors[:, None]
                pull_norm *= factors
                tile, norm = add_tokens(tile, norm, 1.0, qa, pull, pull_norm, dtype)
                if PHI.two:
                    tile2, norm2 = add_tokens(tile2, norm2, 1.0, qb, pull, pull_norm, dtype)
        shares = store_gradients_of_keys(
            keys,
            k_row,
            left,
            matrix,
            low,
            priors,
            scales,
            shares,
            tl.trans(grad_a),
            tl.trans(grad_b),
            dk + tl.cast(at, tl.int64) * EACH * PHI.width,
            dy + tl.cast(at, tl.int64) * PHI.rows,
            pack_keys * PHI.rows,
            KEYS,
            C,
            LEARNED,
            PHI,
        )
    if KEYS > 0:
        r = tl.arange(0, MOST_KEYS)
        tl.store(dpriors + (tl.program_id(0).to(tl.int64) * KEYS + r), shares, mask=r < KEYS)
