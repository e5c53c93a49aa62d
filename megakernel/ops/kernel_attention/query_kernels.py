"""Triton kernels of kernel attention's backward pass over queries: their gradients, and states of queries."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.arguments import (
    features_at,
    features_of_queries,
    first_key,
    half_of_state,
    head_at,
    keys_before,
    load_numbers,
    matrix_of,
    queries_of_program,
    store_half_of_state,
    tile_rows,
)
from megakernel.ops.kernel_attention.kernels import pairs_of, state_factors, store_features, sums_of_keys
from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded, slope_of_half, store_slope
from megakernel.ops.kernels.states import add_tokens, empty_norm, first_token, scales_of_addition, sum_of_norm


@triton.jit
def do_of_keys(x, y, do, keys, state, seq, tile, r, TILING: tl.constexpr, PHI: tl.constexpr):
    """Weighted sums (C,) of do_i.v_j over what queries with features x, y see, and sums of the weights; log scale r.

    Recomputed where the rounded output is too inexact: one key may have nearly all the weight, and its terms nearly
    cancel. For unbounded maps the weights are not rounded either.
    """
    if PHI.unbounded and not PHI.two:
        total, den, _r = sums_of_keys(x, y, keys, state, seq, tile, r, do, TILING, PHI)
    else:
        sums, den, _r = sums_of_keys(x, y, keys, state, seq, tile, r, None, TILING, PHI)
        total = tl.sum(sums * do.to(tl.float32), 1)
    return total, den


@triton.jit
def gradient_of_half(
    half: tl.constexpr, do, delta, r, keys, state, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr
):
    """One half (C, MP) of sum_j m_j (do_i.v_j + delta_i) phi(k_j); arguments as in `sums_of_keys`."""
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    v = head_at(keys.v, tile.batch, tile.kv)
    dtype: tl.constexpr = v.dtype.element_ty
    of_state = state_factors(tile, tl.load(state.logs + tile.entry), r, TILING, PHI)
    sums, norm = half_of_state(state, tile.entry, half, PHI, VP)
    grad = (of_state * delta)[:, None] * norm[None, :]
    grad += dot(do, tl.trans(sums), dtype) * of_state[:, None]
    if TILING.causal:
        for here in range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK):
            at = tl.cast(here, tl.int64) * keys.v.row
            values = load_rows(v + at, keys.v.row, seq.keys - here, BK, TILING.values, VP)
            a, b, scales = features_at(
                keys.tokens, tile.batch, tile.kv, seq.heads, seq.keys, seq.keys, here, BK, PHI
            )
            along = tl.zeros((C, BK), tl.float32) + delta[:, None] + dot(do, tl.trans(values), dtype)
            along = pairs_of(along, keys, here, scales, r, seq, tile, TILING, PHI)
            grad += dot(along, b if half else a, dtype)
    return grad


@triton.jit
def across_features(slope, along, size, tokens, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr):
    """Correct `slope` so that the gradient is orthogonal to the features, with which its dot product is now `along`.

    For maps with one half, whose features have the squared length `size`. Features are loaded again, because the loops
    need the registers.
    """
    tl.debug_barrier()
    a, _b, _own = features_of_queries(tokens, seq, tile, TILING, PHI)
    share = (along / tl.where(size == 0, 1.0, size))[:, None]
    a = a.to(tl.float32)
    return slope - slope_of_half(0, a * share, a, a, PHI)


@triton.jit
def bwd_dq(
    queries,
    keys,
    matrix,
    state,
    seq,
    out,
    dq,
    dy,
    TILING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of queries (B, H, N, D), optionally of projected queries (..., M), delta, and features.

    Terms have the factor do_i.v_j - mean_i. Unless the map is unbounded, mean_i is do_i.o_i, of the rounded output, as
    in kernels of softmax: states in bfloat16 round no less. Programs as in `kernels.read`.
    """
    C: tl.constexpr = TILING.chunk
    MP: tl.constexpr = PHI.padded_rows
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    tokens = queries.tokens.rows
    q, left = tile_rows(tokens, tile), tile.end - tile.at
    dtype: tl.constexpr = q.dtype.element_ty
    numbers = tile.head.to(tl.int64) * seq.queries
    place = numbers + tile.at
    projection = matrix_of(matrix, tile.kv, PHI)

    if queries.tokens.features is not None:
        qa, qb, own = phi(q, tokens.row, left, projection, matrix.low, C, PHI)
        qa, qb = rounded(qa, dtype), rounded(qb, dtype)
        store_features(qa, qb, own, queries.tokens, tile.head, seq.queries, tile.at, left, PHI)
        # Read back below; until then, the gradients need the registers.
        tl.debug_barrier()
    do = load_rows(tile_rows(queries.grad, tile), queries.grad.row, left, C, TILING.values, VP)
    reciprocal = load_numbers(queries.reciprocal + numbers, tile.at, seq.queries, C)
    r = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        scales = queries.scale + tile.key_head.to(tl.int64) * seq.queries
        r = load_numbers(scales, tile.at, seq.queries, C)
    mean = tl.zeros((C,), tl.float32)
    if NORMALIZE:
        if PHI.unbounded:
            qa, qb, _own = features_of_queries(queries.tokens, seq, tile, TILING, PHI)
            total, den = do_of_keys(qa, qb, do, keys, state, seq, tile, r, TILING, PHI)
            mean = tl.where(reciprocal == 0, 0.0, total / tl.where(reciprocal == 0, 1.0, den))
        else:
            o = load_rows(tile_rows(out, tile), out.row, left, C, TILING.values, VP)
            mean = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(queries.delta + numbers + tile.rows, -mean * reciprocal, mask=tile.rows < tile.end)
    slope = tl.zeros((C, MP), tl.float32)
    along = tl.zeros((C,), tl.float32)
    size = tl.zeros((C,), tl.float32)
    for half in tl.static_range(2 if PHI.two else 1):
        # Divide by den after the sums: 1 / den is small, and dO / den would have few digits in float16.
        grad = gradient_of_half(half, do, -mean, r, keys, state, seq, tile, TILING, PHI) * reciprocal[:, None]
        qa, qb, _own = features_of_queries(queries.tokens, seq, tile, TILING, PHI)
        qa, qb = qa.to(tl.float32), qb.to(tl.float32)
        along += tl.sum(grad * (qb if half else qa), 1)
        size += tl.sum(qb * qb if half else qa * qa, 1)
        slope += slope_of_half(half, grad, qb if half else qa, qa if half else qb, PHI)
    if NORMALIZE and not PHI.two:
        # Quotients do not depend on the length of phi(q). With two halves, the error is below rounding.
        slope = across_features(slope, along, size, queries.tokens, seq, tile, TILING, PHI)
    of_projected = None if dy is None else dy + place * PHI.rows
    LEARNED: tl.constexpr = dy is not None
    store_slope(q, tokens.row, left, projection, slope, dq + place * PHI.width, of_projected, C, LEARNED, PHI)


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
    tile = tl.zeros((MP, VP), tl.float32)
    norm = empty_norm(MP, dtype)
    log = EMPTY if PHI.unbounded else 0.0
    for at in range(begin, stop, C):
        rows, left = at + tl.arange(0, C), stop - at
        first = first_token(seq.starts, batch, rows, seq.length, seq.start)
        reads = ((first < begin) | (not TILING.causal)) & (rows < stop)
        scales = tl.zeros((C,), tl.float32)
        if PHI.unbounded:
            r = tl.load(queries.scale + head.to(tl.int64) * seq.queries + rows, mask=rows < stop, other=EMPTY)
            reads = reads & (r > EMPTY)
            scales = tl.where(reads, -r, EMPTY)
        shrink, factors, log = scales_of_addition(log, scales, True, PHI.unbounded)
        tile *= shrink
        norm *= shrink
        factors = tl.where(reads, factors, 0.0)
        for g in range(G):
            query_head = kv * G + g
            place = (head * G + g).to(tl.int64) * seq.queries
            given = head_at(queries.grad, batch, query_head) + tl.cast(at, tl.int64) * queries.grad.row
            do = load_rows(given, queries.grad.row, left, C, TILING.values, VP)
            reciprocal = load_numbers(queries.reciprocal + place, at, seq.queries, C)
            minus_mean = tl.zeros((C,), tl.float32)
            if queries.delta is not None:
                delta = load_numbers(queries.delta + place, at, seq.queries, C)
                minus_mean = delta / tl.where(reciprocal == 0, 1.0, reciprocal)
            a, b, _own = features_at(
                queries.tokens, batch, query_head, seq.heads * G, seq.queries, stop, at, C, PHI
            )
            weights = reciprocal * factors
            tile, norm = add_tokens(tile, norm, b if half else a, weights, do, minus_mean, dtype)
    return tile, sum_of_norm(norm, dtype), log


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
    for half in tl.static_range(2 if PHI.two else 1):
        tile, norm, log = sums_of_queries(queries, seq, batch, kv, begin, stop, half, TILING, PHI)
        store_half_of_state(tile, norm, state, entry, half, PHI, VP)
    tl.store(state.logs + entry, log)
