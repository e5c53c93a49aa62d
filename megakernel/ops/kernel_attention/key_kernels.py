"""Triton kernel of kernel attention's backward pass over keys: gradients of keys, values, key weights and priors."""

import triton
import triton.language as tl

from megakernel.ops.kernel_attention.arguments import (
    features_at,
    half_of_state,
    head_at,
    load_numbers,
    matrix_of,
    places_of_keys,
    tile_of_program,
    tiles_of,
    token_of,
)
from megakernel.ops.kernel_attention.kernels import weights_of
from megakernel.ops.kernels.features import dot, load_rows, rounded, store_gradient, store_rows
from megakernel.ops.kernels.mixtures import store_gradients_of_keys
from megakernel.ops.kernels.states import first_token


@triton.jit
def gradient_from_state(
    tile, norm, values, state, entry, half: tl.constexpr, TILING: tl.constexpr, PHI: tl.constexpr
):
    """Gradients of features (C, MP): values (C, VP) times one half of a state, tile (MP, VP), plus norm (MP,).

    If the state has higher precision than the values, a second product adds its rounding error, so that sums and
    normalizer cancel exactly. The state is loaded again; keeping it would exceed registers and shared memory.
    """
    dtype: tl.constexpr = values.dtype
    grad = dot(values, tl.trans(tile), dtype) + norm[None, :]
    if tile.dtype != dtype:
        tl.debug_barrier()
        tile, norm = half_of_state(state, entry, half, PHI, TILING.padded_values)
        grad += dot(values, tl.trans(tile - rounded(tile, dtype).to(tl.float32)), dtype)
    return grad


@triton.jit
def behind_factors(places, last, weights, scales, log, TILING: tl.constexpr, PHI: tl.constexpr):
    """(C,): each key's factor of the state of later segments' queries; 0 if it does not enter the outgoing state."""
    enters = (places >= last) | (not TILING.causal)
    if PHI.unbounded:
        return tl.where(enters & (weights != 0), tl.exp(scales + log), 0.0)
    return tl.where(enters, 1.0, 0.0)


@triton.jit
def queries_of_keys(
    products, rows, first, places, stop, scales, r, seq, TILING: tl.constexpr, PHI: tl.constexpr
):
    """Products (C, BQ) of keys and queries times relative scales; 0 where masked. See `kernels.pairs_of`.

    Queries from `stop` on see the keys through their state, so they are masked.
    """
    if PHI.unbounded:
        products *= tl.exp(tl.minimum(scales[:, None] - r[None, :], 0.0))
    if TILING.rank == 0:
        visible = places[:, None] <= rows[None, :]
    else:
        visible = (places[:, None] < rows[None, :]) & (rows < stop)[None, :]
    if seq.starts is not None:
        visible &= places[:, None] >= first[None, :]
    return tl.where(visible, products, 0.0)


@triton.jit
def bwd_dkv(
    queries,
    keys,
    matrix,
    state,
    seq,
    dk,
    dv,
    dy,
    dkey_weights,
    dpriors,
    TILING: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of keys (B, H_kv, N, D), optionally of projected keys (..., M), of values, key weights and priors.

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
    place = head.to(tl.int64) * seq.keys + at
    rows, left = at + tl.arange(0, C), end - at
    places = places_of_keys(rows, seq, batch, TILING)
    stop = tl.minimum((segment + 1) * TILING.segment, seq.length)
    last = first_token(seq.starts, batch, stop - 1, seq.length, seq.start)
    weights = weights_of(keys.key_weights, head, at, seq.keys, end, C)
    a, b, scales = features_at(keys.tokens, batch, kv, seq.heads, seq.keys, end, at, C, PHI)
    v = head_at(keys.v, batch, kv) + tl.cast(at, tl.int64) * keys.v.row
    values = load_rows(v, keys.v.row, left, C, TILING.values, VP)
    dtype: tl.constexpr = v.dtype.element_ty
    behind = behind_factors(places, last, weights, scales, tl.load(state.logs + entry), TILING, PHI)
    tile, norm = half_of_state(state, entry, 0, PHI, VP)
    du_norm = tl.zeros((C,), tl.float32)
    if dv is not None:
        du = dot(a, tile, dtype)
        du_norm = tl.sum(a.to(tl.float32) * norm[None, :], 1)
        tl.debug_barrier()
    if dk is not None:
        grad_a = gradient_from_state(tile, norm, values, state, entry, 0, TILING, PHI) * behind[:, None]
        grad_b = grad_a
    if PHI.two:
        tile, norm = half_of_state(state, entry, 1, PHI, VP)
        if dv is not None:
            du += dot(b, tile, dtype)
            du_norm += tl.sum(b.to(tl.float32) * norm[None, :], 1)
        if dk is not None:
            grad_b = gradient_from_state(tile, norm, values, state, entry, 1, TILING, PHI) * behind[:, None]
    if dv is not None:
        du *= behind[:, None]
        du_norm *= behind
    if TILING.causal:
        for g in range(G):
            query_head = kv * G + g
            numbers = (head * G + g).to(tl.int64) * seq.queries
            for here in range(token_of(at, TILING), tl.minimum(stop, seq.queries), BQ):
                seats = here + tl.arange(0, BQ)
                first = first_token(seq.starts, batch, seats, seq.length, seq.start)
                r = tl.zeros((BQ,), tl.float32)
                if PHI.unbounded:
                    r = load_numbers(queries.scale + head.to(tl.int64) * seq.queries, here, seq.queries, BQ)
                given = head_at(queries.grad, batch, query_head) + tl.cast(here, tl.int64) * queries.grad.row
                do = load_rows(given, queries.grad.row, seq.queries - here, BQ, TILING.values, VP)
                reciprocal = load_numbers(queries.reciprocal + numbers, here, seq.queries, BQ)
                delta = tl.zeros((BQ,), tl.float32)
                if queries.delta is not None:
                    delta = load_numbers(queries.delta + numbers, here, seq.queries, BQ)
                qa, qb, _own = features_at(
                    queries.tokens, batch, query_head, seq.heads * G, seq.queries, seq.queries, here, BQ, PHI
                )
                if dv is not None:
                    similar = dot(a, tl.trans(qa), dtype)
                    if PHI.two:
                        similar += dot(b, tl.trans(qb), dtype)
                    similar = queries_of_keys(
                        similar, seats, first, places, stop, scales, r, seq, TILING, PHI
                    )
                    if dkey_weights is not None:
                        du_norm += tl.sum(similar * delta[None, :], 1)
                    du += dot(similar * reciprocal[None, :], do, dtype)
                if dk is not None:
                    along = dot(values, tl.trans(do), dtype) * reciprocal[None, :] + delta[None, :]
                    along = queries_of_keys(along, seats, first, places, stop, scales, r, seq, TILING, PHI)
                    grad_a += dot(along, qa, dtype)
                    if PHI.two:
                        grad_b += dot(along, qb, dtype)
    if dv is not None:
        store_rows(dv + place * TILING.values, TILING.values, left, du * weights[:, None], TILING.values, VP)
        if dkey_weights is not None:
            total = tl.sum(du * values.to(tl.float32), 1) + du_norm
            tl.store(dkey_weights + place + tl.arange(0, C), total, mask=rows < end)
    if dk is not None:
        grad_a *= weights[:, None]
        grad_b *= weights[:, None]
        tokens = keys.tokens.rows
        k = head_at(tokens, batch, kv) + tl.cast(at, tl.int64) * tokens.row
        projection = matrix_of(matrix, kv, PHI)
        of_projected = None if dy is None else dy + place * PHI.rows
        LEARNED: tl.constexpr = dy is not None
        if TILING.keys == 0:
            store_gradient(
                k,
                tokens.row,
                left,
                projection,
                a.to(tl.float32),
                b.to(tl.float32),
                grad_a,
                grad_b,
                dk + place * PHI.width,
                of_projected,
                C,
                LEARNED,
                PHI,
            )
        else:
            heads = tl.num_programs(0) // tiles_of(seq.keys, TILING.span, C)
            store_gradients_of_keys(
                k,
                tokens.row,
                left,
                projection,
                matrix.low,
                keys.priors + kv * TILING.keys,
                scales,
                grad_a,
                grad_b,
                dk + place * TILING.keys * PHI.width,
                of_projected,
                heads.to(tl.int64) * seq.keys * PHI.rows,
                dpriors + place * TILING.keys,
                TILING.keys,
                C,
                LEARNED,
                PHI,
            )
