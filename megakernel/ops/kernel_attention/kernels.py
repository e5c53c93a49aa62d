"""Triton kernels of kernel attention: the outputs, and what all its kernels share.

A program is one segment of a key head and one block of values (`states.share_of_program`): it carries the state through
the chunks of its segment, in registers, in float32. A query sees the visible keys of its chunk by a product of tiles,
and the state of all keys before it. With u_j = m_j [v_j, 1] and the pull g_i = [do_i, -do_i.o_i] / den_i (normalized;
otherwise [do_i, 0]):

    dphi(q_i) = sum_j (g_i.u_j) phi(k_j)    dphi(k_j) = sum_i (g_i.u_j) phi(q_i)    du_j = sum_i (phi(q_i).phi(k_j)) g_i

so the gradient of queries (`query_kernels`) needs the state of keys before, and that of keys (`key_kernels`) the same
sum over queries after: a state of queries, whose values are pulls. The second part of a pull is its drift, with which
the g_i.u_j of a normalized query add up to 0 under its weights.

Unbounded maps: phi(k_j) = values exp(c_j). Query i divides by exp(r_i), r_i the largest c_j of the keys it sees, so
that later keys reach it not even by rounding. Its own scale cancels in the quotient. A state of queries has the log
scales -r_i.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, store_rows
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
    priors,
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
    KEYS: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, N, V), and for backward 1 / den of every query and r of unbounded maps, (B, H, N) float32.

    Without NORMALIZE the former is what sums are multiplied by, exp(r_i + log of the query's scale).
    """
    head, segment, block = share_of_program(segments, VP, BV)
    row, kv = head // heads, head % heads
    column = block * BV
    dtype: tl.constexpr = q.dtype.element_ty
    q += row.to(tl.int64) * q_batch + (kv * G).to(tl.int64) * q_head
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    mass += head.to(tl.int64) * length
    matrix += kv * PHI.rows * PHI.width
    priors += kv * KEYS
    group = head.to(tl.int64) * G * length
    entry = head.to(tl.int64) * (states + 1) + (segment if CAUSAL else states)
    FP: tl.constexpr = PHI.padded_features
    sums += entry * FP * VP
    norms += entry * FP
    log = tl.load(logs + entry)
    tile, norm = load_state(sums, norms, column, 0, PHI.padded_rows, VP, BV)
    if PHI.two:
        tile2, norm2 = load_state(sums, norms, column, 1, PHI.padded_rows, VP, BV)

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
        pairs, of_state, r = pair_factors(scales, weights, visible, reads, log, PHI.unbounded)
        for g in range(G):
            queries = q + tl.cast(g, tl.int64) * q_head + at * q_far
            x, y, own = phi(queries, q_row, left, matrix, low, C, PHI)
            x, y = rounded(x, dtype), rounded(y, dtype)
            total = dot(x, tile, dtype)
            den = tl.sum(x.to(tl.float32) * norm[None, :], 1)
            if PHI.two:
                total += dot(y, tile2, dtype)
                den += tl.sum(y.to(tl.float32) * norm2[None, :], 1)
            total *= of_state[:, None]
            den *= of_state
            if CAUSAL:
                weighed = dot(x, tl.trans(a), dtype)
                if PHI.two:
                    weighed += dot(y, tl.trans(b), dtype)
                weighed *= pairs * weights[None, :]
                total += dot(weighed, columns, dtype)
                den += tl.sum(weighed, 1)
            if NORMALIZE:
                factor = tl.where(den == 0, 0.0, 1.0 / tl.where(den == 0, 1.0, den))
            else:
                factor = tl.exp(own + r) if PHI.unbounded else tl.full((C,), 1.0, tl.float32)
            places = out + (group + g * length + at) * V + column
            store_rows(places, V, left, total * factor[:, None], V - column, BV)
            if column == 0:
                tl.store(inverse + group + g * length + rows, factor, mask=rows < length)
        if PHI.unbounded and column == 0:
            tl.store(scale + head.to(tl.int64) * length + rows, r, mask=rows < length)
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
