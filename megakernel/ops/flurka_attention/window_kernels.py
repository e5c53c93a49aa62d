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

from megakernel.ops.flurka_attention.arguments import (
    angles_ptr,
    block_end,
    load_gamma,
    load_gate,
    window_start,
)
from megakernel.ops.kernels.arguments import head_ptr, load_vector, projection_ptr
from megakernel.ops.kernels.feature_maps import phi, store_dx_from_dphi
from megakernel.ops.kernels.primitives import (
    EMPTY,
    dot,
    exp,
    exp2,
    load_rows,
    materialize,
    rounded,
    store_rows,
)
from megakernel.ops.kernels.states import document_start


@triton.jit
def apply_rotary(x1, x2, table, NEAR: tl.constexpr, BACK: tl.constexpr):
    """Halves (C, DH) rotated by the angles of consecutive places; rows of `table` have cosines, then sines."""
    rows, columns = tl.arange(0, x1.shape[0])[:, None], tl.arange(0, NEAR.padded_half)[None, :]
    # Offsets are constant here; those of `load_rows` would stay in registers through a loop.
    ptrs = table + (rows * (2 * NEAR.half) + columns)
    cos = tl.load(ptrs, mask=columns < NEAR.half, other=0.0)
    sin = tl.load(ptrs + NEAR.half, mask=columns < NEAR.half, other=0.0)
    sin = -sin if BACK else sin
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def window_tile(
    x,
    stride,
    num_valid,
    window,
    table_row,
    matrix,
    low,
    C: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """The halves of C tokens at `x` for products in a window, and their log scales (C,).

    table_row: row of the first token in the table of angles.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    if NEAR.softmax:
        x1 = load_rows(x, stride, num_valid, C, NEAR.half, NEAR.padded_half)
        x2 = load_rows(x + NEAR.half, stride, num_valid, C, NEAR.width - NEAR.half, NEAR.padded_half)
        logs = tl.zeros((C,), tl.float32)
        if NEAR.rotary:
            x1, x2 = apply_rotary(
                x1.to(tl.float32), x2.to(tl.float32), angles_ptr(window, table_row, NEAR), NEAR, False
            )
    else:
        x1, x2, logs = phi(x, stride, num_valid, matrix, low, C, PHI)
    return materialize(rounded(x1, dtype)), materialize(rounded(x2, dtype)), logs


@triton.jit
def scores(x1, x2, y1, y2, dtype: tl.constexpr, NEAR: tl.constexpr, PHI: tl.constexpr):
    """Dot products of all rows of (x1, x2) with all rows of (y1, y2), tiles in halves."""
    b_s = dot(x1, tl.trans(y1), dtype)
    if NEAR.softmax or PHI.has_two_halves:
        b_s += dot(x2, tl.trans(y2), dtype)
    return b_s


@triton.jit
def window_weights(b_s, logs, lse, visible, NEAR: tl.constexpr, PHI: tl.constexpr):
    """Weights of pairs without `near_factor`, and their derivatives with respect to `b_s`.

    logs: log scales of keys; lse: that of queries, or r under phi; both broadcastable to the tile.
    """
    if NEAR.softmax:
        weights = tl.where(visible, exp2(b_s * NEAR.softmax_scale_log2 - lse), 0.0)
        return weights, weights * (NEAR.softmax_scale_log2 * 0.6931471805599453)
    if PHI.unbounded:
        factors = tl.where(visible & (lse > EMPTY), exp(tl.minimum(logs - lse, 0.0)), 0.0)
    else:
        factors = tl.where(visible, 1.0, 0.0)
    return b_s * factors, factors


@triton.jit
def near_factor(
    merge_params, factor, head, query_head, at, first, length, C: tl.constexpr, NEAR: tl.constexpr
):
    """n_i of C queries: the gate; 1 for a softmax that shares its normalizer with landmarks; 1 / den under phi.

    first: where their documents start. factor: factor of the sums over landmarks, for all query heads of the batch;
    under phi exp(gamma) / den.
    """
    if NEAR.gated:
        n = tl.sigmoid(load_gate(merge_params, head, at, first, length, C, NEAR))
    elif NEAR.softmax:
        n = tl.full((C,), 1.0, tl.float32)
    else:
        n = load_vector(factor + head.to(tl.int64) * length, at, length, C)
        n *= tl.exp(-load_gamma(merge_params, query_head))
    return n


@triton.jit
def load_lse(merged, head, key_head, at, length, C: tl.constexpr, NEAR: tl.constexpr, PHI: tl.constexpr):
    """(C,): the log scale of the weights of each query: lse, r, or 0."""
    if NEAR.softmax:
        lse = load_vector(merged.lse + head.to(tl.int64) * length, at, length, C)
    elif PHI.unbounded:
        lse = load_vector(merged.scale + key_head.to(tl.int64) * length, at, length, C)
    else:
        lse = tl.zeros((C,), tl.float32)
    return lse


@triton.jit
def store_halves(dx, row, dx1, dx2, num_valid, MORE: tl.constexpr, NEAR: tl.constexpr):
    """Store the gradients of halves as rows of tokens, `row` elements apart; MORE adds to what is stored."""
    C: tl.constexpr = dx1.shape[0]
    rest: tl.constexpr = NEAR.width - NEAR.half
    if MORE:
        dx1 += load_rows(dx, row, num_valid, C, NEAR.half, NEAR.padded_half).to(tl.float32)
        dx2 += load_rows(dx + NEAR.half, row, num_valid, C, rest, NEAR.padded_half).to(tl.float32)
    store_rows(dx, row, num_valid, dx1, NEAR.half, NEAR.padded_half)
    store_rows(dx + NEAR.half, row, num_valid, dx2, rest, NEAR.padded_half)


@triton.jit
def window_backward(
    queries,
    window,
    pools,
    matrix,
    seq,
    merge_params,
    merged,
    do,
    means,
    dlandmarks,
    dpooled,
    pool_parts,
    dk,
    dv,
    p_dproj,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Gradients of keys, `Rows` (B, H_kv, before + N, D), values, `Rows` (..., V), and projected keys (..., M); rows of
    tiles are keys.

    They come through windows and through landmarks, E^T dlandmarks and F^T dpooled; dlandmarks: (B, H_kv, blocks R, D),
    dpooled: (..., V). `pool_parts`, two of (B, H_kv, before + N, R) float32: dlandmarks.k and dpooled.v of each key and
    the landmarks of its block, which `pool_backward` sums. Program: TILING.chunk keys of a key head.
    """
    C: tl.constexpr = TILING.chunk
    BQ: tl.constexpr = TILING.block
    G: tl.constexpr = TILING.group
    VP: tl.constexpr = TILING.padded_values
    B: tl.constexpr = NEAR.block_size
    R: tl.constexpr = TILING.rank
    WIDTH: tl.constexpr = NEAR.padded_half if NEAR.softmax else PHI.padded_rows
    PAIR: tl.constexpr = NEAR.softmax or PHI.has_two_halves
    tiles = tl.cdiv(window.before + seq.length, C)
    head, at = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C - window.before
    batch, kv = head // seq.heads, head % seq.heads
    rows, num_valid = at + tl.arange(0, C), seq.length - at
    row_idx = tl.cast(at + window.before, tl.int64)
    p_k = head_ptr(window.keys, batch, kv) + row_idx * window.keys.row
    p_v = head_ptr(window.v, batch, kv) + row_idx * window.v.row
    dtype: tl.constexpr = p_k.dtype.element_ty
    projection = projection_ptr(matrix, kv, PHI)

    b_v = load_rows(p_v, window.v.row, num_valid, C, TILING.values, VP)
    b_k1, b_k2, logs = window_tile(
        p_k, window.keys.row, num_valid, window, 0, projection, matrix.low, C, NEAR, PHI
    )
    b_dk1 = tl.zeros((C, WIDTH), tl.float32)
    b_dk2 = tl.zeros((C, WIDTH), tl.float32)
    b_dv = tl.zeros((C, VP), tl.float32)
    # One loop over all queries, of all heads, that see a key of the tile.
    first = tl.maximum(at, 0)
    # Places in a tail are negative, but not below -NEAR.reach, so `reach` is not.
    reach = at + C - 1 + NEAR.reach
    last = tl.minimum(reach // B * B if window.windows is None else reach, seq.queries)
    steps = tl.maximum(tl.cdiv(last - first, BQ), 0)
    for step in range(G * steps):
        g = step // steps
        q_start = first + step % steps * BQ
        query_head = kv * G + g
        q_head = head * G + g
        row_offset = tl.cast(q_start, tl.int64)
        q_idx = q_start + tl.arange(0, BQ)
        starts = window_start(window, seq, batch, q_idx, NEAR)
        p_q = head_ptr(queries, batch, query_head) + row_offset * queries.row
        begins = document_start(seq.starts, batch, q_idx, seq.length, seq.start)
        n = near_factor(
            merge_params, merged.factor, q_head, query_head, q_start, begins, seq.length, BQ, NEAR
        )
        lse = load_lse(merged, q_head, head, q_start, seq.length, BQ, NEAR, PHI)
        mean = load_vector(means + q_head.to(tl.int64) * seq.length, q_start, seq.length, BQ)
        p_do = head_ptr(do, batch, query_head) + row_offset * do.row
        b_do = load_rows(p_do, do.row, seq.length - q_start, BQ, TILING.values, VP)
        b_q1, b_q2, _own = window_tile(
            p_q,
            queries.row,
            seq.length - q_start,
            window,
            q_start - at,
            projection,
            matrix.low,
            BQ,
            NEAR,
            PHI,
        )
        mask = (rows[:, None] >= starts[None, :]) & (rows[:, None] <= q_idx[None, :])
        mask &= (q_idx < seq.length)[None, :]
        b_s = scores(b_k1, b_k2, b_q1, b_q2, dtype, NEAR, PHI)
        b_p, ds_factor = window_weights(b_s, logs[:, None], lse[None, :], mask, NEAR, PHI)
        b_dv += dot(b_p * n[None, :], b_do, dtype)
        b_ds = (dot(b_v, tl.trans(b_do), dtype) * n[None, :] - mean[None, :]) * ds_factor
        b_dk1 += dot(b_ds, b_q1, dtype)
        if PAIR:
            b_dk2 += dot(b_ds, b_q2, dtype)

    RP: tl.constexpr = TILING.padded_rank
    HALF: tl.constexpr = NEAR.half
    HP: tl.constexpr = NEAR.padded_half
    REST: tl.constexpr = NEAR.width - NEAR.half
    b_dx1, b_dx2 = b_dk1, b_dk2
    if not NEAR.softmax:
        b_dx1 = tl.zeros((C, HP), tl.float32)
        b_dx2 = b_dx1
    elif NEAR.rotary:
        b_dx1, b_dx2 = apply_rotary(b_dk1, b_dk2, angles_ptr(window, 0, NEAR), NEAR, True)
    b_pool_k = tl.zeros((C, RP), tl.float32)
    b_pool_v = b_pool_k
    landmark = tl.arange(0, RP)
    blocks = tl.cdiv(seq.length, B)
    nearest = at + NEAR.reach - B
    for block in range(tl.maximum(nearest, 0) // B, tl.minimum((nearest + C + B - 2) // B + 1, blocks)):
        end = block_end(window, seq, batch, block, NEAR)
        inner = rows - (end - NEAR.reach + 1)
        pooled = ((inner >= 0) & (inner < B) & (end >= 0))[:, None] & (landmark < R)[None, :]
        q_idx = kv.to(tl.int64) * pools.head + landmark[None, :] * B + inner[:, None]
        q_start = (head.to(tl.int64) * blocks + block) * R
        b_e = tl.load(pools.of_keys + q_idx, mask=pooled, other=0.0)
        dlandmarks1 = load_rows(dlandmarks + q_start * NEAR.width, NEAR.width, R, RP, HALF, HP)
        dlandmark_k = dot(
            load_rows(p_k, window.keys.row, num_valid, C, HALF, HP), tl.trans(dlandmarks1), dtype
        )
        b_dx1 += dot(b_e, dlandmarks1, dtype)
        dlandmarks2 = load_rows(dlandmarks + q_start * NEAR.width + HALF, NEAR.width, R, RP, REST, HP)
        dlandmark_k += dot(
            load_rows(p_k + HALF, window.keys.row, num_valid, C, REST, HP), tl.trans(dlandmarks2), dtype
        )
        b_dx2 += dot(b_e, dlandmarks2, dtype)
        b_pool_k += tl.where(pooled, dlandmark_k, 0.0)
        b_f = tl.load(pools.of_values + q_idx, mask=pooled, other=0.0)
        b_dpooled = load_rows(dpooled + q_start * TILING.values, TILING.values, R, RP, TILING.values, VP)
        b_pool_v += tl.where(pooled, dot(b_v, tl.trans(b_dpooled), dtype), 0.0)
        b_dv += dot(b_f, b_dpooled, dtype)

    entry = head.to(tl.int64) * (window.before + seq.length) + row_idx
    store_rows(pool_parts[0] + entry * R, R, num_valid, b_pool_k, R, RP)
    store_rows(pool_parts[1] + entry * R, R, num_valid, b_pool_v, R, RP)
    store_rows(head_ptr(dv, batch, kv) + row_idx * dv.row, dv.row, num_valid, b_dv, TILING.values, VP)
    p_dk = head_ptr(dk, batch, kv) + row_idx * dk.row
    store_halves(p_dk, dk.row, b_dx1, b_dx2, num_valid, False, NEAR)
    if not NEAR.softmax:
        tl.debug_barrier()
        LEARNED: tl.constexpr = p_dproj is not None
        b_k1, b_k2, _logs = phi(p_k, window.keys.row, num_valid, projection, matrix.low, C, PHI)
        store_dx_from_dphi(
            p_k,
            window.keys.row,
            num_valid,
            projection,
            b_k1,
            b_k2,
            b_dk1,
            b_dk2,
            p_dk,
            dk.row,
            None if p_dproj is None else p_dproj + entry * PHI.rows,
            C,
            LEARNED,
            PHI,
            MORE=True,
        )
