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

from megakernel.ops.kernel_attention.arguments import (
    features_at,
    first_key,
    half_of_state,
    head_at,
    keys_before,
    load_numbers,
    matrix_of,
    places_of_keys,
    queries_of_program,
    store_half_of_state,
    tile_rows,
)
from megakernel.ops.kernels.features import EMPTY, dot, exp, load_rows, once, phi, rounded, store_rows
from megakernel.ops.kernels.mixtures import phi_of_keys
from megakernel.ops.kernels.states import add_tokens, empty_norm, first_token, largest_of, sum_of_norm


@triton.jit
def weights_of(key_weights, head, at, length, end, C: tl.constexpr):
    """Key weights (C,) float32 of a head of `length`, starting at key `at`; 0 from key `end` on."""
    if key_weights is None:
        weights = tl.where(at + tl.arange(0, C) < end, 1.0, 0.0)
    else:
        weights = load_numbers(key_weights + head.to(tl.int64) * length, at, end, C)
    return weights


@triton.jit
def store_features(a, b, logs, tokens, head, length, at, count, PHI: tl.constexpr):
    """Store the features of the first `count` tokens of a tile, for `features_at` to load."""
    place = head.to(tl.int64) * length + at
    rows = tl.arange(0, a.shape[0])
    features = tokens.features + place * PHI.padded_features
    store_rows(features, PHI.padded_features, count, a, PHI.padded_rows, PHI.padded_rows)
    if PHI.two:
        more = features + PHI.padded_rows
        store_rows(more, PHI.padded_features, count, b, PHI.padded_rows, PHI.padded_rows)
    if PHI.unbounded:
        tl.store(tokens.logs + place + rows, logs, mask=rows < count)


@triton.jit
def sums_of_segment(
    keys, seq, batch, kv, begin, end, last, log, half: tl.constexpr, TILING: tl.constexpr, PHI: tl.constexpr
):
    """One half of the sum of a segment's keys, for a state of log scale `log`: sums (MP, VP), normalizer (MP,)."""
    MP: tl.constexpr = PHI.padded_rows
    VP: tl.constexpr = TILING.padded_values
    C: tl.constexpr = TILING.chunk
    head = batch * seq.heads + kv
    v = head_at(keys.v, batch, kv)
    tile = tl.zeros((MP, VP), tl.float32)
    dtype: tl.constexpr = v.dtype.element_ty
    norm = empty_norm(MP, dtype)
    for at in range(begin, end, C):
        far = tl.cast(at, tl.int64) * keys.v.row
        values = load_rows(v + far, keys.v.row, end - at, C, TILING.values, VP)
        a, b, logs = features_at(keys.tokens, batch, kv, seq.heads, seq.keys, end, at, C, PHI)
        weights = weights_of(keys.key_weights, head, at, seq.keys, end, C)
        weights = tl.where(places_of_keys(at + tl.arange(0, C), seq, batch, TILING) >= last, weights, 0.0)
        if PHI.unbounded:
            # The scale of a key with weight 0 may exceed `log`, which is the largest of the others.
            weights *= exp(tl.minimum(logs - log, 0.0))
        ones = tl.full((C,), 1.0, tl.float32)
        tile, norm = add_tokens(tile, norm, b if half else a, weights, values, ones, dtype)
    return tile, sum_of_norm(norm, dtype)


@triton.jit
def largest_of_document(one, starts, other, starts_too):
    """Combine function of a running maximum that restarts at document starts."""
    return tl.where(starts_too, other, tl.maximum(one, other)), starts | starts_too


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
    last = first_token(seq.starts, batch, final, seq.length, seq.start)
    log = EMPTY if PHI.unbounded else 0.0
    if keys.tokens.features is not None:
        # First all features, then all sums: both at once would not fit into registers.
        k = head_at(keys.tokens.rows, batch, kv)
        dtype: tl.constexpr = keys.v.pointer.dtype.element_ty
        projection = matrix_of(matrix, kv, PHI)
        priors = None if keys.priors is None else keys.priors + kv * TILING.keys
        largest = EMPTY
        for at in range(begin, end, C):
            rows = at + tl.arange(0, C)
            x = k + tl.cast(at, tl.int64) * keys.tokens.rows.row
            a, b, logs = phi_of_keys(
                x, keys.tokens.rows.row, end - at, projection, matrix.low, priors, TILING.keys, C, PHI
            )
            if PHI.decays:
                logs -= load_numbers(seq.decay.of_keys + head.to(tl.int64) * seq.keys, at, end, C)
            a, b = once(rounded(a, dtype)), once(rounded(b, dtype)) if PHI.two else a
            store_features(a, b, logs, keys.tokens, head, seq.keys, at, end - at, PHI)
            if PHI.unbounded:
                logs = tl.where(weights_of(keys.key_weights, head, at, seq.keys, end, C) != 0, logs, EMPTY)
                places = places_of_keys(rows, seq, batch, TILING)
                log = tl.maximum(log, largest_of(tl.where(places >= last, logs, EMPTY)))
                if scale is not None:
                    first = first_token(seq.starts, batch, rows, seq.length, seq.start)
                    seen, _starts = tl.associative_scan((logs, first == rows), 0, largest_of_document)
                    r = tl.maximum(tl.where(first < at, largest, EMPTY), seen)
                    tl.store(scale + head.to(tl.int64) * seq.keys + rows, r, mask=rows < end)
                    largest = largest_of(tl.where(rows == tl.minimum(at + C, end) - 1, r, EMPTY))
        tl.debug_barrier()
    entry = tl.program_id(0)
    tile, norm = sums_of_segment(keys, seq, batch, kv, begin, end, last, log, 0, TILING, PHI)
    store_half_of_state(tile, norm, state, entry, 0, PHI, VP)
    if PHI.two:
        tile, norm = sums_of_segment(keys, seq, batch, kv, begin, end, last, log, 1, TILING, PHI)
        store_half_of_state(tile, norm, state, entry, 1, PHI, VP)
    tl.store(state.logs + entry, log)


@triton.jit
def visible_keys(here, seq, tile, TILING: tl.constexpr):
    """(C, BK) mask: the query sees this key, of those starting at `here`."""
    places = places_of_keys(here + tl.arange(0, TILING.block), seq, tile.batch, TILING)[None, :]
    visible = places <= tile.rows[:, None] if TILING.rank == 0 else places < tile.rows[:, None]
    if seq.starts is not None:
        visible &= places >= tile.first[:, None]
    return visible


@triton.jit
def largest_logs(keys, seq, tile, TILING: tl.constexpr):
    """(C,): the largest log scale of the keys that each query sees in its segment."""
    BK: tl.constexpr = TILING.block
    r = tl.full((TILING.chunk,), EMPTY, tl.float32)
    for here in range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK):
        scales = load_numbers(keys.tokens.logs + tile.key_head.to(tl.int64) * seq.keys, here, seq.keys, BK)
        exists = weights_of(keys.key_weights, tile.key_head, here, seq.keys, seq.keys, BK) != 0
        scales = tl.where(exists, scales, EMPTY)
        r = tl.maximum(r, tl.max(tl.where(visible_keys(here, seq, tile, TILING), scales[None, :], EMPTY), 1))
    return r


@triton.jit
def pairs_of(products, keys, here, scales, r, seq, tile, TILING: tl.constexpr, PHI: tl.constexpr):
    """Products (C, BK) of queries and keys times key weights and relative scales; 0 where masked."""
    if PHI.unbounded:
        # The scale of a key that is masked or has weight 0 may exceed r.
        products *= exp(tl.minimum(scales[None, :] - r[:, None], 0.0))
    if keys.key_weights is not None:
        products *= weights_of(keys.key_weights, tile.key_head, here, seq.keys, seq.keys, TILING.block)[
            None, :
        ]
    return tl.where(visible_keys(here, seq, tile, TILING), products, 0.0)


@triton.jit
def state_factors(tile, log, r, TILING: tl.constexpr, PHI: tl.constexpr):
    """(C,): the factors by which queries scale the state that enters their segment; 0 if they do not see it."""
    reads = (tile.first < tile.begin) | (not TILING.causal)
    if PHI.unbounded:
        reads = reads & (r > EMPTY)
        return tl.where(reads, tl.exp(tl.minimum(log - r, 0.0)), 0.0)
    return tl.where(reads, 1.0, 0.0)


@triton.jit
def sums_of_keys(x, y, keys, state, seq, tile, largest, do, TILING: tl.constexpr, PHI: tl.constexpr):
    """Sums (C, VP) and normalizers (C,) of queries with features x, y, and r, the log scale of both.

    They run over the keys in the entering state and, if TILING.causal, the segment's keys before tile.stop. For
    unbounded maps, `largest` (C,) are the largest log scales that the queries see in the segment. Given do (C, VP), for
    maps with one half, the sums are (C,), of do_i.v_j, with unrounded weights: backward's terms
    w_ij (do_i.v_j - mean_i) must add up to 0.
    """
    C: tl.constexpr = TILING.chunk
    BK: tl.constexpr = TILING.block
    VP: tl.constexpr = TILING.padded_values
    v = head_at(keys.v, tile.batch, tile.kv)
    dtype: tl.constexpr = v.dtype.element_ty
    sums, norm = half_of_state(state, tile.entry, 0, PHI, VP)
    total = (
        dot(x, sums, dtype) if do is None else tl.sum(x.to(tl.float32) * dot(do, tl.trans(sums), dtype), 1)
    )
    den = tl.sum(x.to(tl.float32) * norm[None, :], 1)
    if PHI.two:
        sums, norm = half_of_state(state, tile.entry, 1, PHI, VP)
        total += dot(y, sums, dtype)
        den += tl.sum(y.to(tl.float32) * norm[None, :], 1)
    log = tl.load(state.logs + tile.entry)
    r = tl.zeros((C,), tl.float32) + log
    if TILING.causal and PHI.unbounded:
        r = tl.maximum(tl.where(tile.first < tile.begin, r, EMPTY), largest)
    factor = state_factors(tile, log, r, TILING, PHI)
    total *= factor[:, None] if do is None else factor
    den *= factor
    if TILING.causal:
        # Reduced over threads after the loop.
        total_of_pairs = tl.zeros((C, BK), tl.float32)
        den_of_pairs = tl.zeros((C, BK), tl.float32)
        for here in range(first_key(tile.begin, TILING), keys_before(tile.stop, seq, TILING), BK):
            at = tl.cast(here, tl.int64) * keys.v.row
            values = load_rows(v + at, keys.v.row, seq.keys - here, BK, TILING.values, VP)
            a, b, scales = features_at(
                keys.tokens, tile.batch, tile.kv, seq.heads, seq.keys, seq.keys, here, BK, PHI
            )
            weighed = dot(x, tl.trans(a), dtype)
            if PHI.two:
                weighed += dot(y, tl.trans(b), dtype)
            weighed = pairs_of(weighed, keys, here, scales, r, seq, tile, TILING, PHI)
            if do is None:
                # Rounded before both sums, so that the mean of a single value is exactly that value.
                weighed = rounded(weighed, dtype)
                total += dot(weighed, values, dtype)
                den += tl.sum(weighed.to(tl.float32), 1)
            else:
                total_of_pairs += weighed * dot(do, tl.trans(values), dtype)
                den_of_pairs += weighed
        if do is not None:
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
    TILING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, N, V), and for backward 1 / den (B, H, N) and, for unbounded maps, r (B, H_kv, N), float32.

    If a query's weights add up to less than PHI.least, its output and its 1 / den are 0, and backward skips it.
    Without NORMALIZE, 1 / den is the factor of the sums, exp(r_i + log of the query's scale). If TILING.causal, `state`
    has one entry per segment, otherwise a single one of all keys. Program: TILING.chunk queries of a head.
    """
    C: tl.constexpr = TILING.chunk
    VP: tl.constexpr = TILING.padded_values
    tile = queries_of_program(seq, TILING)
    q, left = tile_rows(queries, tile), tile.end - tile.at
    dtype: tl.constexpr = q.dtype.element_ty

    x, y, own = phi(q, queries.row, left, matrix_of(matrix, tile.kv, PHI), matrix.low, C, PHI)
    x, y = once(rounded(x, dtype)), once(rounded(y, dtype)) if PHI.two else x
    scales_at = tile.key_head.to(tl.int64) * seq.queries
    largest = tl.zeros((C,), tl.float32)
    if PHI.unbounded and TILING.causal:
        # Another query head of this key head may already have stored r here; the maximum below is then still r.
        largest = load_numbers(scale + scales_at, tile.at, tile.end, C)
    total, den, r = sums_of_keys(x, y, keys, state, seq, tile, largest, None, TILING, PHI)
    if NORMALIZE:
        empty = tl.abs(den) < PHI.least
        factor = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, den))
    else:
        if PHI.decays:
            own += load_numbers(seq.decay.of_queries + scales_at, tile.at, tile.end, C)
        factor = tl.exp(own + r) if PHI.unbounded else tl.full((C,), 1.0, tl.float32)
    numbers = tile.head.to(tl.int64) * seq.queries
    store_rows(tile_rows(out, tile), out.row, left, total * factor[:, None], TILING.values, VP)
    tl.store(reciprocal + numbers + tile.rows, factor, mask=tile.rows < tile.end)
    if PHI.unbounded and tile.query_head % TILING.group == 0:
        tl.store(scale + scales_at + tile.rows, r, mask=tile.rows < tile.end)
