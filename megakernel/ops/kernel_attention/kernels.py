"""Triton kernels of kernel attention: outputs, and the gradients of queries and of keys and values.

Programs are (segment of a key head, block of values): a program carries the state through the chunks of its segment,
in registers, in float32. A query sees the visible keys of its chunk by a product of tiles, and the state of all keys
before it. With u_j = m_j [v_j, 1] and the pull g_i = [do_i, -do_i.o_i] / den_i (normalized; otherwise [do_i, 0]):

    dphi(q_i) = sum_j (g_i.u_j) phi(k_j)    dphi(k_j) = sum_i (g_i.u_j) phi(q_i)    du_j = sum_i (phi(q_i).phi(k_j)) g_i

so the gradient of queries needs the state of keys before, and that of keys the same sum over queries after.

Unbounded maps: phi(k_j) = values exp(c_j). Query i divides by exp(r_i), r_i the largest c_j of the keys it sees, so that
later keys reach it not even by rounding. Its own scale cancels in the quotient.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, phi_gradient, store_rows
from megakernel.ops.kernels.states import add_to_state, first_token, load_mass, load_state


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
    FP: tl.constexpr,
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
    tile, norm, log = load_state(sums + entry * FP * VP, norms + entry * FP, logs + entry, FP, VP, BV, column)

    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, length)
    for at in range(begin, end, C):
        rows = at + tl.arange(0, C)
        first = first_token(starts, row, rows, length, start, PACKED)
        visible, reads = visible_pairs(rows, first, at, CAUSAL)
        if CAUSAL:
            keys = load_rows(k, rows, k_row, length, D, DP)
            columns = load_rows(v, rows, v_row, length, V - column, BV)
            values, scales = phi(keys, matrix, low, MAP, D, DP, M, MP, SCALE, COEFFICIENT)
            weights = load_mass(mass, rows, length, MASSES)
        else:
            weights = tl.zeros((C,), tl.float32)
            scales = weights
        pairs, of_state, r = pair_factors(scales, weights, visible, reads, log, UNBOUNDED)
        for g in tl.static_range(G):
            queries = load_rows(q + g * q_head, rows, q_row, length, D, DP)
            asked, own = phi(queries, matrix, low, MAP, D, DP, M, MP, SCALE, COEFFICIENT)
            total = dot(asked, tile, dtype) * of_state[:, None]
            den = tl.sum(asked * norm[None, :], 1) * of_state
            if CAUSAL:
                weighed = dot(asked, tl.trans(values), dtype) * pairs * weights[None, :]
                total += dot(weighed, columns, dtype)
                den += tl.sum(weighed, 1)
            if NORMALIZE:
                factor = tl.where(den == 0, 0.0, 1.0 / tl.where(den == 0, 1.0, den))
            else:
                factor = tl.exp(own + r) if UNBOUNDED else tl.full((C,), 1.0, tl.float32)
            places = out + (group + g * length) * V + column
            store_rows(places, rows, V, length, total * factor[:, None], V - column, BV)
            if tl.program_id(1) == 0:
                tl.store(inverse + group + g * length + rows, factor, mask=rows < length)
        if UNBOUNDED:
            if tl.program_id(1) == 0:
                tl.store(scale + head.to(tl.int64) * length + rows, r, mask=rows < length)
        if CAUSAL:
            last = first_token(starts, row, tl.minimum(at + C, length) - 1, length, start, PACKED)
            written = tl.where(rows >= last, weights, 0.0)
            scales = tl.where(written != 0, scales, EMPTY) if UNBOUNDED else scales
            tile, norm, log = add_to_state(
                tile,
                norm,
                log,
                values,
                scales,
                columns.to(tl.float32) * written[:, None],
                written,
                last < at,
                dtype,
                UNBOUNDED,
            )
