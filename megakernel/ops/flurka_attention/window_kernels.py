"""Triton kernels of FLuRKA's exact part: tiles of windows, and the gradients of keys and values.

Weights in a window are exp(q.k / sqrt(d)) or phi(q).phi(k). Either way q and k are split into two halves: under a
softmax the halves of the vectors, which a rotation pairs element by element; under phi the halves of the features. With
the weights w_ij of a window, and their factor n_i (`near_factor`):

    dv_j = sum_i n_i w_ij do_i    ds_ij = w_ij (n_i do_i.v_j - mean_i)

for scores s = q.k / sqrt(d). mean_i is the mean of do_i.v_j under all weights of the output; for a gated window, under
the window's own weights, times the gate. Under phi, ds_ij / w_ij is the gradient of phi(q_i).phi(k_j).
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.arguments import angles, block_end, gamma_of, gate_of, window_start
from megakernel.ops.kernel_attention.arguments import head_at, load_numbers, matrix_of
from megakernel.ops.kernels.features import (
    EMPTY,
    dot,
    exp,
    exp2,
    load_rows,
    once,
    phi,
    rounded,
    store_gradient,
    store_rows,
)
from megakernel.ops.kernels.states import first_token


@triton.jit
def turned(first, second, table, NEAR: tl.constexpr, BACK: tl.constexpr):
    """Halves (C, DH) rotated by the angles of consecutive places; rows of `table` have cosines, then sines."""
    rows, columns = tl.arange(0, first.shape[0])[:, None], tl.arange(0, NEAR.padded_half)[None, :]
    # Offsets are constant here; those of `load_rows` would stay in registers through a loop.
    places = table + (rows * (2 * NEAR.half) + columns)
    cos = tl.load(places, mask=columns < NEAR.half, other=0.0)
    sin = tl.load(places + NEAR.half, mask=columns < NEAR.half, other=0.0)
    sin = -sin if BACK else sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def window_tile(
    x, stride, count, window, place, matrix, low, C: tl.constexpr, NEAR: tl.constexpr, PHI: tl.constexpr
):
    """The halves of C tokens at `x` for products in a window, and their log scales (C,).

    place: row of the first token in the table of angles.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    if NEAR.softmax:
        a = load_rows(x, stride, count, C, NEAR.half, NEAR.padded_half)
        b = load_rows(x + NEAR.half, stride, count, C, NEAR.width - NEAR.half, NEAR.padded_half)
        logs = tl.zeros((C,), tl.float32)
        if NEAR.rotary:
            a, b = turned(a.to(tl.float32), b.to(tl.float32), angles(window, place, NEAR), NEAR, False)
    else:
        a, b, logs = phi(x, stride, count, matrix, low, C, PHI)
    return once(rounded(a, dtype)), once(rounded(b, dtype)), logs


@triton.jit
def products(a, b, a2, b2, dtype: tl.constexpr, NEAR: tl.constexpr, PHI: tl.constexpr):
    """Dot products of all rows of (a, b) with all rows of (a2, b2), tiles given in halves."""
    found = dot(a, tl.trans(a2), dtype)
    if NEAR.softmax or PHI.two:
        found += dot(b, tl.trans(b2), dtype)
    return found


@triton.jit
def window_weights(similar, logs, level, visible, NEAR: tl.constexpr, PHI: tl.constexpr):
    """Weights of pairs without `near_factor`, and their derivatives with respect to `similar`.

    logs: log scales of keys; level: lse of queries, or r under phi; both broadcastable to the tile.
    """
    if NEAR.softmax:
        weights = tl.where(visible, exp2(similar * NEAR.sharp - level), 0.0)
        return weights, weights * (NEAR.sharp * 0.6931471805599453)
    if PHI.unbounded:
        factors = tl.where(visible & (level > EMPTY), exp(tl.minimum(logs - level, 0.0)), 0.0)
    else:
        factors = tl.where(visible, 1.0, 0.0)
    return similar * factors, factors


@triton.jit
def near_factor(shares, factor, head, query_head, at, first, length, C: tl.constexpr, NEAR: tl.constexpr):
    """n_i of C queries: the gate; 1 for a softmax that shares its normalizer with landmarks; 1 / den under phi.

    first: where their documents start. factor: factor of the sums over landmarks, for all query heads of the batch;
    under phi exp(gamma) / den.
    """
    if NEAR.gated:
        numbers = tl.sigmoid(gate_of(shares, head, at, first, length, C, NEAR))
    elif NEAR.softmax:
        numbers = tl.full((C,), 1.0, tl.float32)
    else:
        numbers = load_numbers(factor + head.to(tl.int64) * length, at, length, C)
        numbers *= tl.exp(-gamma_of(shares, query_head))
    return numbers


@triton.jit
def level_of(merged, head, key_head, at, length, C: tl.constexpr, NEAR: tl.constexpr, PHI: tl.constexpr):
    """(C,): the log scale of the weights of each query: lse, r, or 0."""
    if NEAR.softmax:
        level = load_numbers(merged.lse + head.to(tl.int64) * length, at, length, C)
    elif PHI.unbounded:
        level = load_numbers(merged.scale + key_head.to(tl.int64) * length, at, length, C)
    else:
        level = tl.zeros((C,), tl.float32)
    return level


@triton.jit
def store_halves(dx, first, second, count, MORE: tl.constexpr, NEAR: tl.constexpr):
    """Store the gradients of halves as rows of tokens; MORE adds to what is stored."""
    C: tl.constexpr = first.shape[0]
    rest: tl.constexpr = NEAR.width - NEAR.half
    if MORE:
        first += load_rows(dx, NEAR.width, count, C, NEAR.half, NEAR.padded_half).to(tl.float32)
        second += load_rows(dx + NEAR.half, NEAR.width, count, C, rest, NEAR.padded_half).to(tl.float32)
    store_rows(dx, NEAR.width, count, first, NEAR.half, NEAR.padded_half)
    store_rows(dx + NEAR.half, NEAR.width, count, second, rest, NEAR.padded_half)


@triton.jit
def window_backward(
    queries,
    window,
    pools,
    matrix,
    seq,
    shares,
    merged,
    grad,
    means,
    dlandmarks,
    dpooled,
    numbers,
    dk,
    dv,
    dy,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of keys (B, H_kv, before + N, D), values (..., V) and projected keys (..., M); rows of tiles are keys.

    They come through windows and through landmarks, E^T dlandmarks and F^T dpooled; dlandmarks: (B, H_kv, blocks R, D),
    dpooled: (..., V). `numbers`, two of (B, H_kv, before + N, R) float32: dlandmarks.k and dpooled.v of each key and
    the landmarks of its block, which `pool_backward` sums. Program: TILING.chunk keys of a key head.
    """
    C: tl.constexpr = TILING.chunk
    BQ: tl.constexpr = TILING.block
    G: tl.constexpr = TILING.group
    VP: tl.constexpr = TILING.padded_values
    B: tl.constexpr = NEAR.block_size
    R: tl.constexpr = TILING.rank
    WIDTH: tl.constexpr = NEAR.padded_half if NEAR.softmax else PHI.padded_rows
    PAIR: tl.constexpr = NEAR.softmax or PHI.two
    tiles = tl.cdiv(window.before + seq.length, C)
    head, at = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C - window.before
    batch, kv = head // seq.heads, head % seq.heads
    rows, left = at + tl.arange(0, C), seq.length - at
    seat = tl.cast(at + window.before, tl.int64)
    k = head_at(window.keys, batch, kv) + seat * window.keys.row
    v = head_at(window.v, batch, kv) + seat * window.v.row
    dtype: tl.constexpr = k.dtype.element_ty
    projection = matrix_of(matrix, kv, PHI)

    values = load_rows(v, window.v.row, left, C, TILING.values, VP)
    ka, kb, logs = window_tile(k, window.keys.row, left, window, 0, projection, matrix.low, C, NEAR, PHI)
    of_a = tl.zeros((C, WIDTH), tl.float32)
    of_b = tl.zeros((C, WIDTH), tl.float32)
    of_values = tl.zeros((C, VP), tl.float32)
    # One loop over all queries, of all heads, that see a key of the tile.
    first = tl.maximum(at, 0)
    # Places in a tail are negative, but not below -NEAR.reach, so `reach` is not.
    reach = at + C - 1 + NEAR.reach
    last = tl.minimum(reach // B * B if window.windows is None else reach, seq.queries)
    steps = tl.maximum(tl.cdiv(last - first, BQ), 0)
    for step in range(G * steps):
        g = step // steps
        place = first + step % steps * BQ
        query_head = kv * G + g
        own = head * G + g
        far = tl.cast(place, tl.int64)
        seats = place + tl.arange(0, BQ)
        starts = window_start(window, seq, batch, seats, NEAR)
        q = head_at(queries, batch, query_head) + far * queries.row
        begins = first_token(seq.starts, batch, seats, seq.length, seq.start)
        n = near_factor(shares, merged.factor, own, query_head, place, begins, seq.length, BQ, NEAR)
        level = level_of(merged, own, head, place, seq.length, BQ, NEAR, PHI)
        shift = load_numbers(means + own.to(tl.int64) * seq.length, place, seq.length, BQ)
        given = head_at(grad, batch, query_head) + far * grad.row
        do = load_rows(given, grad.row, seq.length - place, BQ, TILING.values, VP)
        qa, qb, _own = window_tile(
            q, queries.row, seq.length - place, window, place - at, projection, matrix.low, BQ, NEAR, PHI
        )
        seen = (rows[:, None] >= starts[None, :]) & (rows[:, None] <= seats[None, :])
        seen &= (seats < seq.length)[None, :]
        similar = products(ka, kb, qa, qb, dtype, NEAR, PHI)
        weights, change = window_weights(similar, logs[:, None], level[None, :], seen, NEAR, PHI)
        of_values += dot(weights * n[None, :], do, dtype)
        slope = (dot(values, tl.trans(do), dtype) * n[None, :] - shift[None, :]) * change
        of_a += dot(slope, qa, dtype)
        if PAIR:
            of_b += dot(slope, qb, dtype)

    RP: tl.constexpr = TILING.padded_rank
    HALF: tl.constexpr = NEAR.half
    HP: tl.constexpr = NEAR.padded_half
    REST: tl.constexpr = NEAR.width - NEAR.half
    pooled_a, pooled_b = of_a, of_b
    if not NEAR.softmax:
        pooled_a = tl.zeros((C, HP), tl.float32)
        pooled_b = pooled_a
    elif NEAR.rotary:
        pooled_a, pooled_b = turned(of_a, of_b, angles(window, 0, NEAR), NEAR, True)
    of_keys = tl.zeros((C, RP), tl.float32)
    of_columns = of_keys
    landmark = tl.arange(0, RP)
    blocks = tl.cdiv(seq.length, B)
    nearest = at + NEAR.reach - B
    for block in range(tl.maximum(nearest, 0) // B, tl.minimum((nearest + C + B - 2) // B + 1, blocks)):
        end = block_end(window, seq, batch, block, NEAR)
        inner = rows - (end - NEAR.reach + 1)
        pooled = ((inner >= 0) & (inner < B) & (end >= 0))[:, None] & (landmark < R)[None, :]
        seats = kv.to(tl.int64) * pools.head + landmark[None, :] * B + inner[:, None]
        place = (head.to(tl.int64) * blocks + block) * R
        shares_of_keys = tl.load(pools.of_keys + seats, mask=pooled, other=0.0)
        first_half = load_rows(dlandmarks + place * NEAR.width, NEAR.width, R, RP, HALF, HP)
        along = dot(load_rows(k, window.keys.row, left, C, HALF, HP), tl.trans(first_half), dtype)
        pooled_a += dot(shares_of_keys, first_half, dtype)
        second_half = load_rows(dlandmarks + place * NEAR.width + HALF, NEAR.width, R, RP, REST, HP)
        along += dot(load_rows(k + HALF, window.keys.row, left, C, REST, HP), tl.trans(second_half), dtype)
        pooled_b += dot(shares_of_keys, second_half, dtype)
        of_keys += tl.where(pooled, along, 0.0)
        shares_of_values = tl.load(pools.of_values + seats, mask=pooled, other=0.0)
        columns = load_rows(dpooled + place * TILING.values, TILING.values, R, RP, TILING.values, VP)
        of_columns += tl.where(pooled, dot(values, tl.trans(columns), dtype), 0.0)
        of_values += dot(shares_of_values, columns, dtype)

    entry = head.to(tl.int64) * (window.before + seq.length) + seat
    store_rows(numbers[0] + entry * R, R, left, of_keys, R, RP)
    store_rows(numbers[1] + entry * R, R, left, of_columns, R, RP)
    store_rows(dv + entry * TILING.values, TILING.values, left, of_values, TILING.values, VP)
    of_tokens = dk + entry * NEAR.width
    store_halves(of_tokens, pooled_a, pooled_b, left, False, NEAR)
    if not NEAR.softmax:
        tl.debug_barrier()
        LEARNED: tl.constexpr = dy is not None
        ka, kb, _logs = phi(k, window.keys.row, left, projection, matrix.low, C, PHI)
        store_gradient(
            k,
            window.keys.row,
            left,
            projection,
            ka,
            kb,
            of_a,
            of_b,
            of_tokens,
            None if dy is None else dy + entry * PHI.rows,
            C,
            LEARNED,
            PHI,
            MORE=True,
        )
