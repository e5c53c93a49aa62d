"""Triton kernel of FLuRKA's decoding step: one token per sequence, for many sequences in one launch."""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.merge_kernels import merged_parts, weigh_window
from megakernel.ops.flurka_attention.pool_kernels import load_pool, pooled, store_landmarks
from megakernel.ops.flurka_attention.window_kernels import products, window_tile
from megakernel.ops.kernel_attention.arguments import head_at
from megakernel.ops.kernel_attention.decode_kernel import load_half, read_half, store_half
from megakernel.ops.kernels.features import EMPTY, load_rows, phi, rounded, store_rows
from megakernel.ops.kernels.states import add_tokens, scales_of_addition

TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32: a smaller sum of weights counts as 0, see `megakernel.ops.partial_output`."""


@triton.jit
def tokens_to_pool(tail, row, own, D, BP: tl.constexpr, DP: tl.constexpr, NEAR: tl.constexpr):
    """The b tokens (BP, DP) of the block that leaves the window of all later tokens if `own` ends its block.

    They follow the tail's oldest token; if a window is one block, the last of them is `own`.
    """
    if NEAR.blocks > 1:
        tokens = load_rows(tail + row, row, NEAR.block_size, BP, D, DP)
    else:
        tokens = load_rows(tail + row, row, NEAR.block_size - 1, BP, D, DP)
        columns = tl.arange(0, DP)
        last = tl.load(own + columns, mask=columns < D, other=0.0)
        tokens = tl.where((tl.arange(0, BP) == NEAR.block_size - 1)[:, None], last[None, :], tokens)
    return tokens


@triton.jit
def shift_tail(tail, row, own, new, width, D, DP: tl.constexpr, BK: tl.constexpr, NEAR: tl.constexpr):
    """Store the next tail in rows of `width` at `new`: the old one without its oldest token, then `own`."""
    for at in range(0, NEAR.reach, BK):
        left = NEAR.reach - 1 - at
        store_rows(
            new + at * width, width, left, load_rows(tail + (at + 1) * row, row, left, BK, D, DP), D, DP
        )
    columns = tl.arange(0, DP)
    last = tl.load(own + columns, mask=columns < D, other=0.0)
    tl.store(new + (NEAR.reach - 1) * width + columns, last, mask=columns < D)


@triton.jit
def window_halves(queries, q, x, y, window, G: tl.constexpr, NEAR: tl.constexpr):
    """The halves of G queries at `q` for products with a window's keys; x, y: the queries' features."""
    dtype: tl.constexpr = q.dtype.element_ty
    if NEAR.softmax:
        C: tl.constexpr = x.shape[0]
        a = load_rows(q, queries.row, G, C, NEAR.half, NEAR.padded_half).to(tl.float32)
        b = load_rows(q + NEAR.half, queries.row, G, C, NEAR.width - NEAR.half, NEAR.padded_half)
        b = b.to(tl.float32)
        if NEAR.rotary:
            # Queries are at angle 0. Its cosine in the table is the rotation's common factor of all vectors.
            length = tl.load(window.table + NEAR.reach * 2 * NEAR.half)
            a, b = a * length, b * length
    else:
        a, b = x, y
    return rounded(a, dtype), rounded(b, dtype)


@triton.jit
def step(
    queries,
    key,
    value,
    window,
    pools,
    far_mass,
    matrix,
    matrix_head,
    shares,
    positions,
    far_sums,
    far_logs,
    decay,
    out,
    new_sums,
    new_logs,
    new_keys,
    new_values,
    landmarks,
    heads,
    positions_batch,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
    BK: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, V), the far state after the token, and the next tail (B, H_kv, reach, .).

    queries (B, H_kv, G, D), key, value (B, H_kv, 1, .), and the gates (B, H_kv, G, 1) of `shares` are `Rows`. window:
    the tail, with the angles of its places and of the token, which is at angle 0. States have the layout of
    `KernelState`: the normalizer is the last column, and a map's second half starts M rows after its first.
    decay: (B, H_kv) log decay of the state after the token. landmarks: scratch for R rows of D elements per program.

    The token reads the entering state. If it ends a block, the landmarks of the block that leaves the window of all
    later tokens are added to the new state. Program: (key head of a sequence, block of values).
    """
    head = tl.program_id(0)
    batch, kv = head // heads, (head % heads).to(tl.int64)
    column = tl.program_id(1) * BV
    B: tl.constexpr = NEAR.block_size
    MP: tl.constexpr = PHI.padded_rows
    place = tl.load(positions + batch.to(tl.int64) * positions_batch)
    goes_on, sees_far = place > 0, place >= NEAR.reach
    ends = (place % B == B - 1) & (place >= NEAR.reach - 1)
    oldest = tl.maximum(place // B - (NEAR.blocks - 1), 0) * B
    before = (place - oldest).to(tl.int32)
    rows = tl.arange(0, C)
    q = head_at(queries, batch, kv)
    own_key, own_value = head_at(key, batch, kv), head_at(value, batch, kv) + column
    tail_keys, tail_values = head_at(window.keys, batch, kv), head_at(window.v, batch, kv) + column
    projection = matrix + kv * matrix_head
    dtype: tl.constexpr = q.dtype.element_ty

    x, y, own = phi(q, queries.row, G, projection, 0, C, PHI)
    qa, qb = window_halves(queries, q, x, y, window, G, NEAR)
    near = tl.zeros((C, BV), tl.float32)
    den = tl.zeros((C,), tl.float32)
    top = tl.full((C,), EMPTY if (NEAR.softmax or PHI.unbounded) else 0.0, tl.float32)
    tiles = tl.cdiv(before, BK)
    for number in range(0, tiles + 1):
        # After the tiles of the tail comes the token itself.
        is_own = number == tiles
        at = tl.where(is_own, NEAR.reach, NEAR.reach - before + number * BK)
        count = tl.where(is_own, 1, NEAR.reach - at)
        k = tl.where(is_own, own_key, tail_keys + at.to(tl.int64) * window.keys.row)
        v = tl.where(is_own, own_value, tail_values + at.to(tl.int64) * window.v.row)
        ka, kb, logs = window_tile(k, window.keys.row, count, window, at, projection, 0, BK, NEAR, PHI)
        values = load_rows(v, window.v.row, count, BK, V - column, BV)
        similar = products(qa, qb, ka, kb, dtype, NEAR, PHI)
        seen = (tl.arange(0, BK) < count)[None, :]
        weights, shrink, top = weigh_window(
            similar * NEAR.sharp if NEAR.softmax else logs[None, :], similar, top, seen, NEAR, PHI
        )
        near = near * shrink[:, None] + tl.dot(
            rounded(weights, dtype), rounded(values, dtype), input_precision="tf32x3"
        )
        den = den * shrink + tl.sum(weights, 1)

    log = tl.load(far_logs + head)
    a = tl.zeros((RP, MP), tl.float32)
    b = a
    logs = tl.full((RP,), EMPTY, tl.float32)
    columns = tl.zeros((RP, BV), tl.float32)
    token_counts = tl.zeros((RP,), tl.float32)
    if ends:
        room = landmarks + (head * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (R * PHI.width)
        tokens = tokens_to_pool(tail_keys, window.keys.row, own_key, PHI.width, BP, PHI.padded_width, NEAR)
        pool = load_pool(pools.of_keys + kv * pools.head, R, RP, B, BP)
        store_landmarks(room, pooled(tokens, pool, dtype), R, PHI.width)
        tl.debug_barrier()
        a, b, logs = phi(room, PHI.width, R, projection, 0, RP, PHI)
        tokens = tokens_to_pool(tail_values, window.v.row, own_value, V - column, BP, BV, NEAR)
        pool = load_pool(pools.of_values + kv * pools.head, R, RP, B, BP)
        columns = tl.trans(pooled(tokens, pool, dtype))
        token_count = B / R * (1.0 if far_mass is None else tl.exp(tl.load(far_mass + kv).to(tl.float32)))
        token_counts = tl.where(tl.arange(0, RP) < R, token_count, 0.0)

    added = tl.where(token_counts != 0, logs, EMPTY)
    # The token that ends a block reads the state before it decays.
    kept = log + tl.load(decay + head) if PHI.decays else log
    shrink, factors, new_log = scales_of_addition(kept, added, goes_on, PHI.unbounded)
    token_counts *= factors
    ones = tl.full((RP,), 1.0, tl.float32)
    half: tl.constexpr = PHI.rows * (V + 1)
    state = head.to(tl.int64) * (half * (2 if PHI.two else 1))
    tile, norm = load_half(far_sums + state, goes_on, column, MP, PHI.rows, V, BV)
    far, far_den = read_half(x, tile, norm, G)
    if ends:
        tile, norm = add_tokens(tile * shrink, norm * shrink, a, token_counts, columns, ones, tl.float32)
    store_half(new_sums + state, tile, norm, column, PHI.rows, V, BV)
    if PHI.two:
        tile, norm = load_half(far_sums + state + half, goes_on, column, MP, PHI.rows, V, BV)
        more, of_den = read_half(y, tile, norm, G)
        far += more
        far_den += of_den
        if ends:
            tile, norm = add_tokens(tile * shrink, norm * shrink, b, token_counts, columns, ones, tl.float32)
        store_half(new_sums + state + half, tile, norm, column, PHI.rows, V, BV)
    if column == 0:
        tl.store(new_logs + head, new_log if PHI.unbounded else 0.0)

    far_den = tl.where(sees_far, far_den, 0.0)
    far = tl.where(sees_far, far, 0.0)
    far_log = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        # The scale of phi(q) cancels, except against a softmax window.
        far_log += tl.where(sees_far, log, EMPTY)
        if NEAR.softmax:
            far_log += own
    logit, extra = far_den, tl.zeros((C,), tl.float32)
    if NEAR.gated:
        gates = head_at(shares.gate, batch, kv) + rows * shares.gate.row
        logit = tl.load(gates, mask=rows < G, other=0.0).to(tl.float32)
        if shares.gate_weight is not None:
            weights = shares.gate_weight + kv * (G * PHI.width)
            weight = load_rows(weights, PHI.width, G, C, PHI.width, PHI.padded_width).to(tl.float32)
            tokens = load_rows(q, queries.row, G, C, PHI.width, PHI.padded_width).to(tl.float32)
            logit += tl.sum(tokens * weight, 1)
        # Without a far block, the output is exactly the near part.
        logit = tl.where(sees_far, logit, float("inf"))
    elif shares.far_weight is not None:
        extra = tl.load(shares.far_weight + kv * G + rows, mask=rows < G, other=0.0).to(tl.float32)
    total, _spread, _factor, _peak, _share = merged_parts(
        near, den, top, far, far_den, far_log, logit, extra, TINY, NEAR
    )
    store_rows(out + head.to(tl.int64) * (G * V) + column, V, G, total, V - column, BV)

    place_in_tail = head.to(tl.int64) * NEAR.reach
    shift_tail(
        tail_values,
        window.v.row,
        own_value,
        new_values + place_in_tail * V + column,
        V,
        V - column,
        BV,
        BK,
        NEAR,
    )
    if column == 0:
        shift_tail(
            tail_keys,
            window.keys.row,
            own_key,
            new_keys + place_in_tail * PHI.width,
            PHI.width,
            PHI.width,
            PHI.padded_width,
            BK,
            NEAR,
        )
