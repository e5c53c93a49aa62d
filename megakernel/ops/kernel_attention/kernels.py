"""Triton kernels of kernel attention: outputs, and the gradients of queries and of keys and values.

Programs are (segment of a key head, block of values): a program carries the state through the chunks of its segment,
in registers, in float32. A query sees the visible keys of its chunk by a product of tiles, and the state of all keys
before it. With u_j = m_j [v_j, 1] and the pull g_i = [do_i, -do_i.o_i] / den_i (normalized; otherwise [do_i, 0]):

    dphi(q_i) = sum_j (g_i.u_j) phi(k_j)    dphi(k_j) = sum_i (g_i.u_j) phi(q_i)    du_j = sum_i (phi(q_i).phi(k_j)) g_i

so the gradient of queries needs the state of keys before, and that of keys the same sum over queries after: a state
of queries, whose values are pulls.

Unbounded maps: phi(k_j) = values exp(c_j). Query i divides by exp(r_i), r_i the largest c_j of the keys it sees, so
that later keys reach it not even by rounding. Its own scale cancels in the quotient. A state of queries has the log
scales -r_i.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_gradient, store_rows
from megakernel.ops.kernels.states import (
    add_tokens,
    first_token,
    load_mass,
    load_state,
    scales_of_addition,
    store_state,
)


@triton.jit
def pair_factors(scales, weights, visible, reads, log, UNBOUNDED: tl.constexpr):
    """Factors of the pairs (C, C) of a chunk, of the state (C,), and r (C,); 0 where a query does not see."""
    if UNBOUNDED:
        exists = visible & (weights != 0)[None, :]
        seen = tl.where(exists, scales[None, :], EMPTY)
        r = tl.maximum(tl.max(seen, 1), tl.where(reads, log, EMPTY))
        pairs = tl.where(exists, tl.exp(seen - r[:, None]), 0.0)
        return pairs, tl.where(reads, tl.exp(log - r), 0.0), r
    r = tl.zeros((visible.shape[0],), tl.float32)
    return tl.where(visible, 1.0, 0.0), tl.where(reads, 1.0, 0.0), r


@triton.jit
def visible_pairs(rows, first, at, CAUSAL: tl.constexpr):
    """Which keys of its chunk a query sees (C, C), and whether it sees the state that enters (C,)."""
    if CAUSAL:
        pairs = (rows[None, :] <= rows[:, None]) & (rows[None, :] >= first[:, None])
        return pairs, first < at
    nowhere = rows < 0
    return nowhere[:, None] & nowhere[None, :], ~nowhere


@triton.jit
def read(
    q,
    k,
    v,
    mass,
    starts,
    matrix,
    sums,
    norms,
    logs,
    out,
    inverse,
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
    heads,
    segments,
    states,
    low,
    G: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    MASSES: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Outputs (B, H, N, V), and for backward 1 / den of every query and r of unbounded maps, (B, H, N) float32.

    Without NORMALIZE the former is what sums are multiplied by, exp(r_i + log of the query's scale).
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    mass += head.to(tl.int64) * length
    matrix += kv * M * D
    group = head.to(tl.int64) * G * length
    entry = head.to(tl.int64) * (states + 1) + (segment if CAUSAL else states)
    FP: tl.constexpr = MP * (2 if TWO else 1)
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, MP, VP, BV)
    if TWO:
        tile2, norm2 = load_state(sums, norms, column, 1, MP, VP, BV)

    begin = segment * SEGMENT
    q_far, k_far, v_far = tl.cast(q_row, tl.int64), tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    end = tl.minimum(begin + SEGMENT, length)
    for at in range(begin, end, C):
        rows, left = at + tl.arange(0, C), length - at
        first = first_token(starts, row, rows, length, start, PACKED)
        visible, reads = visible_pairs(rows, first, at, CAUSAL)
        if CAUSAL:
            columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV)
            keys = k + at * k_far
            a, b, scales = phi(keys, k_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
            a, b = rounded(a, dtype), rounded(b, dtype)
            weights = load_mass(mass, rows, length, MASSES)
        else:
            weights = tl.zeros((C,), tl.float32)
            scales = weights
        pairs, of_state, r = pair_factors(scales, weights, visible, reads, log, UNBOUNDED)
        for g in range(G):
            queries = q + g * q_head + at * q_far
            x, y, own = phi(queries, q_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
            x, y = rounded(x, dtype), rounded(y, dtype)
            total = dot(x, tile, dtype)
            den = tl.sum(x.to(tl.float32) * norm[None, :], 1)
            if TWO:
                total += dot(y, tile2, dtype)
                den += tl.sum(y.to(tl.float32) * norm2[None, :], 1)
            total *= of_state[:, None]
            den *= of_state
            if CAUSAL:
                weighed = dot(x, tl.trans(a), dtype)
                if TWO:
                    weighed += dot(y, tl.trans(b), dtype)
                weighed *= pairs * weights[None, :]
                total += dot(weighed, columns, dtype)
                den += tl.sum(weighed, 1)
            if NORMALIZE:
                factor = tl.where(den == 0, 0.0, 1.0 / tl.where(den == 0, 1.0, den))
            else:
                factor = tl.exp(own + r) if UNBOUNDED else tl.full((C,), 1.0, tl.float32)
            places = out + (group + g * length + at) * V + column
            store_rows(places, V, left, total * factor[:, None], V - column, BV)
            if column == 0:
                tl.store(inverse + group + g * length + rows, factor, mask=rows < length)
        if UNBOUNDED and column == 0:
            tl.store(scale + head.to(tl.int64) * length + rows, r, mask=rows < length)
        if CAUSAL:
            last = first_token(starts, row, tl.minimum(at + C, length) - 1, length, start, PACKED)
            written = tl.where(rows >= last, weights, 0.0)
            scales = tl.where(written != 0, scales, EMPTY) if UNBOUNDED else scales
            shrink, factors, log = scales_of_addition(log, scales, last < at, UNBOUNDED)
            written *= factors
            added = columns.to(tl.float32) * written[:, None]
            tile, norm = add_tokens(tile, norm, shrink, a, added, written, dtype)
            if TWO:
                tile2, norm2 = add_tokens(tile2, norm2, shrink, b, added, written, dtype)


@triton.jit
def pulls(grad, inverse, drift, row, left, C: tl.constexpr, V, BV: tl.constexpr, FIRST_BLOCK):
    """g_i of C queries: [do / den] (C, BV) float32, and the pull of the normalizer (C,), which the first block has."""
    rows = tl.arange(0, C)
    factor = tl.load(inverse + rows, mask=rows < left, other=0.0)
    pull = load_rows(grad, row, left, C, V, BV).to(tl.float32) * factor[:, None]
    of_norm = tl.load(drift + rows, mask=(rows < left) & FIRST_BLOCK, other=0.0)
    return pull, of_norm


@triton.jit
def pull_of_state(tile, norm, columns, weights, dtype: tl.constexpr):
    """Half a state (MP, BV) times columns (C, BV), its normalizer times weights (C,): gradients of features, (MP, C).

    Features come first in everything of their size, so that the warps share them out: a tile (C, MP) of fewer tokens
    than the warps have rows would be in registers several times.
    """
    return dot(tile, tl.trans(rounded(columns, dtype)), dtype) + norm[:, None] * weights[None, :]


@triton.jit
def write_queries(
    q,
    grad,
    out,
    inverse,
    scale,
    starts,
    matrix,
    sums,
    norms,
    logs,
    drift,
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
    NORMALIZE: tl.constexpr,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """What each segment's queries add to the gradient of the state that enters it, and the drifts -do.o / den.

    As `states.write_keys`, for queries that see that state.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head
    matrix += kv * M * D
    group = head.to(tl.int64) * G * length
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, length)
    q_far, g_far = tl.cast(q_row, tl.int64), tl.cast(g_row, tl.int64)

    tile = tl.zeros((MP, BV), tl.float32)
    tile2 = tile
    norm = tl.zeros((MP,), tl.float32)
    norm2 = norm
    log = EMPTY if UNBOUNDED else 0.0
    for at in range(begin, end, C):
        rows, left = at + tl.arange(0, C), length - at
        first = first_token(starts, row, rows, length, start, PACKED)
        reads = ((first < begin) | (not CAUSAL)) & (rows < length)
        scales = tl.zeros((C,), tl.float32)
        if UNBOUNDED:
            r = tl.load(scale + head.to(tl.int64) * length + rows, mask=rows < length, other=EMPTY)
            reads = reads & (r > EMPTY)
            scales = tl.where(reads, -r, EMPTY)
        shrink, factors, log = scales_of_addition(log, scales, True, UNBOUNDED)
        tile *= shrink
        norm *= shrink
        if TWO:
            tile2 *= shrink
            norm2 *= shrink
        factors = tl.where(reads, factors, 0.0)
        for g in range(G):
            places = group + g * length + at
            given = grad + g * g_head + at * g_far
            if NORMALIZE and column == 0:
                product = tl.zeros((C,), tl.float32)
                for block in range(0, V, BV):
                    outer = load_rows(given + block, g_row, left, C, V - block, BV).to(tl.float32)
                    inner = load_rows(out + places * V + block, V, left, C, V - block, BV).to(tl.float32)
                    product += tl.sum(outer * inner, 1)
                here = tl.arange(0, C)
                den = tl.load(inverse + places + here, mask=here < left, other=0.0)
                tl.store(drift + places + here, -product * den, mask=here < left)
                of_norm = -product * den
            else:
                of_norm = tl.zeros((C,), tl.float32)
            pull, _ = pulls(given + column, inverse + places, drift, g_row, left, C, V - column, BV, False)
            x = q + g * q_head + at * q_far
            a, b, _ = phi(x, q_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
            pull *= factors[:, None]
            of_norm *= factors
            tile, norm = add_tokens(tile, norm, 1.0, rounded(a, dtype), pull, of_norm, dtype)
            if TWO:
                tile2, norm2 = add_tokens(tile2, norm2, 1.0, rounded(b, dtype), pull, of_norm, dtype)
    entry = head.to(tl.int64) * (segments + 1) + segment
    FP: tl.constexpr = MP * (2 if TWO else 1)
    sums += entry * FP * VP
    norms += entry * FP
    store_state(tile, norm, sums, norms, column, 0, MP, VP, BV)
    if TWO:
        store_state(tile2, norm2, sums, norms, column, 1, MP, VP, BV)
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
    sums,
    norms,
    logs,
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
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Gradient of queries (blocks, B, H, N, D), a part for each block of values, and of projected ones (..., M).

    tokens: B H N, the rows of one part.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    mass += head.to(tl.int64) * length
    matrix += kv * M * D
    group = head.to(tl.int64) * G * length
    part = tl.program_id(1).to(tl.int64) * tokens + group
    entry = head.to(tl.int64) * (states + 1) + (segment if CAUSAL else states)
    FP: tl.constexpr = MP * (2 if TWO else 1)
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, MP, VP, BV)
    if TWO:
        tile2, norm2 = load_state(sums, norms, column, 1, MP, VP, BV)

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
            a, b, scales = phi(keys, k_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
            a, b = rounded(a, dtype), rounded(b, dtype)
            weights = load_mass(mass, rows, length, MASSES)
        else:
            weights = tl.zeros((C,), tl.float32)
            scales = weights
        pairs, of_state, _ = pair_factors(scales, weights, visible, reads, log, UNBOUNDED)
        for g in range(G):
            places = group + g * length + at
            given = grad + g * g_head + at * g_far
            pull, of_norm = pulls(
                given, inverse + places, drift + places, g_row, left, C, V - column, BV, column == 0
            )
            seen = pull * of_state[:, None]
            seen_norm = of_norm * of_state
            grad_a = pull_of_state(tile, norm, seen, seen_norm, dtype)
            grad_b = grad_a
            if TWO:
                grad_b = pull_of_state(tile2, norm2, seen, seen_norm, dtype)
            if CAUSAL:
                along = dot(pull, tl.trans(columns), dtype) + of_norm[:, None]
                along *= pairs * weights[None, :]
                along = tl.trans(rounded(along, dtype))
                grad_a += dot(tl.trans(a), along, dtype)
                if TWO:
                    grad_b += dot(tl.trans(b), along, dtype)
            x = q + g * q_head + at * q_far
            qa, qb, _ = phi(x, q_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
            grad_a, grad_b = tl.trans(grad_a), tl.trans(grad_b)
            if NORMALIZE:
                # A quotient does not depend on the length of phi(q): its gradient stands across phi(q), which
                # rounded terms miss most where features hardly differ from each other.
                along_q = tl.sum(grad_a * qa, 1)
                length_q = tl.sum(qa * qa, 1)
                if TWO:
                    along_q += tl.sum(grad_b * qb, 1)
                    length_q += tl.sum(qb * qb, 1)
                share = along_q / tl.where(length_q == 0, 1.0, length_q)
                grad_a -= qa * share[:, None]
                if TWO:
                    grad_b -= qb * share[:, None]
            store_gradient(
                x,
                q_row,
                left,
                matrix,
                qa,
                qb,
                grad_a,
                grad_b,
                dq + (part + g * length + at) * D,
                dy + (part + g * length + at) * M,
                C,
                LEARNED,
                MAP,
                D,
                DP,
                M,
                MP,
                K,
                SCALE,
                COEFFICIENT,
            )
        if CAUSAL:
            last = first_token(starts, row, tl.minimum(at + C, length) - 1, length, start, PACKED)
            written = tl.where(rows >= last, weights, 0.0)
            scales = tl.where(written != 0, scales, EMPTY) if UNBOUNDED else scales
            shrink, factors, log = scales_of_addition(log, scales, last < at, UNBOUNDED)
            written *= factors
            added = columns.to(tl.float32) * written[:, None]
            tile, norm = add_tokens(tile, norm, shrink, a, added, written, dtype)
            if TWO:
                tile2, norm2 = add_tokens(tile2, norm2, shrink, b, added, written, dtype)


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
def pull_values(
    q,
    k,
    v,
    grad,
    mass,
    starts,
    matrix,
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
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Gradients of values (B, H_kv, N, V) and parts of those of masses (blocks, B, H_kv, N).

    `sums` holds states of queries, and a program goes from right to left. tokens: B H_kv N, the rows of one part.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = k.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    own = head.to(tl.int64) * length
    mass += own
    scale += own
    matrix += kv * M * D
    group = head.to(tl.int64) * G * length
    part = tl.program_id(1).to(tl.int64) * tokens + own
    entry = head.to(tl.int64) * (states + 1) + (segment if CAUSAL else states)
    FP: tl.constexpr = MP * (2 if TWO else 1)
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, MP, VP, BV)
    if TWO:
        tile2, norm2 = load_state(sums, norms, column, 1, MP, VP, BV)

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
        a, b, scales = phi(keys, k_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
        a, b = rounded(a, dtype), rounded(b, dtype)
        behind = behind_factors(rows, last, weights, scales, log, CAUSAL, UNBOUNDED)
        du = dot(a, tile, dtype)
        du_norm = tl.sum(a.to(tl.float32) * norm[None, :], 1)
        if TWO:
            du += dot(b, tile2, dtype)
            du_norm += tl.sum(b.to(tl.float32) * norm2[None, :], 1)
        du *= behind[:, None]
        du_norm *= behind
        if CAUSAL:
            first = first_token(starts, row, rows, length, start, PACKED)
            r, reads, added = query_scales(scale, rows, first, at, length, UNBOUNDED)
            shrink, factors, log = scales_of_addition(log, added, last < at, UNBOUNDED)
            factors = tl.where(reads, factors, 0.0)
            tile *= shrink
            norm *= shrink
            if TWO:
                tile2 *= shrink
                norm2 *= shrink
            for g in range(G):
                places = group + g * length + at
                given = grad + g * g_head + at * g_far
                x = q + g * q_head + at * q_far
                qa, qb, _ = phi(x, q_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
                qa, qb = rounded(qa, dtype), rounded(qb, dtype)
                similar = dot(a, tl.trans(qa), dtype)
                if TWO:
                    similar += dot(b, tl.trans(qb), dtype)
                similar *= queries_of_keys(rows, first, weights, scales, r, length, UNBOUNDED)
                pull, pull_norm = pulls(
                    given, inverse + places, drift + places, g_row, left, C, V - column, BV, column == 0
                )
                du += dot(similar, pull, dtype)
                du_norm += tl.sum(similar * pull_norm[None, :], 1)
                pull *= factors[:, None]
                pull_norm *= factors
                tile, norm = add_tokens(tile, norm, 1.0, qa, pull, pull_norm, dtype)
                if TWO:
                    tile2, norm2 = add_tokens(tile2, norm2, 1.0, qb, pull, pull_norm, dtype)
        store_rows(dv + (own + at) * V + column, V, left, du * weights[:, None], V - column, BV)
        if MASSES:
            columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV)
            total = tl.sum(du * columns.to(tl.float32), 1) + tl.where(column == 0, du_norm, 0.0)
            tl.store(dmass + part + rows, total, mask=rows < length)


@triton.jit
def pull_keys(
    q,
    k,
    v,
    grad,
    mass,
    starts,
    matrix,
    sums,
    norms,
    logs,
    inverse,
    drift,
    scale,
    dk,
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
    LEARNED: tl.constexpr,
    MASSES: tl.constexpr,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    TWO: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Gradient of keys (blocks, B, H_kv, N, D), a part for each block of values, and of projected ones (..., M).

    As `pull_values`, with half of its products: the two together would not fit into registers.
    """
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    dtype: tl.constexpr = k.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    grad += row.to(tl.int64) * g_batch + (kv * G).to(tl.int64) * g_head + column
    own = head.to(tl.int64) * length
    mass += own
    scale += own
    matrix += kv * M * D
    group = head.to(tl.int64) * G * length
    part = tl.program_id(1).to(tl.int64) * tokens + own
    entry = head.to(tl.int64) * (states + 1) + (segment if CAUSAL else states)
    FP: tl.constexpr = MP * (2 if TWO else 1)
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, MP, VP, BV)
    if TWO:
        tile2, norm2 = load_state(sums, norms, column, 1, MP, VP, BV)

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
        if UNBOUNDED:
            a, b, scales = phi(keys, k_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
        weighed = weights * behind_factors(rows, last, weights, scales, log, CAUSAL, UNBOUNDED)
        columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV)
        lifted = columns.to(tl.float32) * weighed[:, None]
        # The normalizer is in the first block alone.
        of_norm = tl.where(column == 0, weighed, 0.0)
        grad_a = pull_of_state(tile, norm, lifted, of_norm, dtype)
        grad_b = grad_a
        if TWO:
            grad_b = pull_of_state(tile2, norm2, lifted, of_norm, dtype)
        if CAUSAL:
            first = first_token(starts, row, rows, length, start, PACKED)
            r, reads, added = query_scales(scale, rows, first, at, length, UNBOUNDED)
            shrink, factors, log = scales_of_addition(log, added, last < at, UNBOUNDED)
            factors = tl.where(reads, factors, 0.0)
            tile *= shrink
            norm *= shrink
            if TWO:
                tile2 *= shrink
                norm2 *= shrink
            for g in range(G):
                places = group + g * length + at
                given = grad + g * g_head + at * g_far
                pull, pull_norm = pulls(
                    given, inverse + places, drift + places, g_row, left, C, V - column, BV, column == 0
                )
                along = dot(columns, tl.trans(pull), dtype) + pull_norm[None, :]
                along *= (
                    queries_of_keys(rows, first, weights, scales, r, length, UNBOUNDED) * weights[:, None]
                )
                x = q + g * q_head + at * q_far
                qa, qb, _ = phi(x, q_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
                qa, qb = rounded(qa, dtype), rounded(qb, dtype)
                along = tl.trans(rounded(along, dtype))
                grad_a += dot(tl.trans(qa), along, dtype)
                if TWO:
                    grad_b += dot(tl.trans(qb), along, dtype)
                pull *= factors[:, None]
                pull_norm *= factors
                tile, norm = add_tokens(tile, norm, 1.0, qa, pull, pull_norm, dtype)
                if TWO:
                    tile2, norm2 = add_tokens(tile2, norm2, 1.0, qb, pull, pull_norm, dtype)
        # Again rather than kept through the chunk.
        a, b, _ = phi(keys, k_row, left, matrix, low, C, MAP, D, DP, M, MP, K, SCALE, COEFFICIENT)
        store_gradient(
            keys,
            k_row,
            left,
            matrix,
            a,
            b,
            tl.trans(grad_a),
            tl.trans(grad_b),
            dk + (part + at) * D,
            dy + (part + at) * M,
            C,
            LEARNED,
            MAP,
            D,
            DP,
            M,
            MP,
            K,
            SCALE,
            COEFFICIENT,
        )
