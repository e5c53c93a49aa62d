"""Triton kernel of FLuRKA's decoding step: one token per sequence, for many sequences in one launch."""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.merge_kernels import merge_parts, online_softmax_step
from megakernel.ops.flurka_attention.pool_kernels import load_pool, pooled, store_landmarks
from megakernel.ops.flurka_attention.window_kernels import scores, window_tile
from megakernel.ops.kernel_attention.decode_kernel import load_half, read_half, store_half
from megakernel.ops.kernels.arguments import head_ptr
from megakernel.ops.kernels.feature_maps import phi
from megakernel.ops.kernels.primitives import EMPTY, load_rows, rounded, store_rows
from megakernel.ops.kernels.states import add_tokens, rescale_factors

TINY = tl.constexpr(1.1754943508222875e-38)
"""The smallest normal float32: a smaller sum of weights counts as 0, see `megakernel.ops.partial_output`."""


@triton.jit
def tokens_to_pool(tail, row, p_new, D, BP: tl.constexpr, DP: tl.constexpr, NEAR: tl.constexpr):
    """The b tokens (BP, DP) of the block that leaves the window of all later tokens if `p_new` ends its block.

    They follow the tail's oldest token; if a window is one block, the last of them is `p_new`.
    """
    if NEAR.blocks > 1:
        tokens = load_rows(tail + row, row, NEAR.block_size, BP, D, DP)
    else:
        tokens = load_rows(tail + row, row, NEAR.block_size - 1, BP, D, DP)
        columns = tl.arange(0, DP)
        last = tl.load(p_new + columns, mask=columns < D, other=0.0)
        tokens = tl.where((tl.arange(0, BP) == NEAR.block_size - 1)[:, None], last[None, :], tokens)
    return tokens


@triton.jit
def shift_tail(tail, row, p_new, new, width, D, DP: tl.constexpr, BK: tl.constexpr, NEAR: tl.constexpr):
    """Store the next tail in rows of `width` at `new`: the old one without its oldest token, then `p_new`."""
    for at in range(0, NEAR.reach, BK):
        num_valid = NEAR.reach - 1 - at
        store_rows(
            new + at * width,
            width,
            num_valid,
            load_rows(tail + (at + 1) * row, row, num_valid, BK, D, DP),
            D,
            DP,
        )
    columns = tl.arange(0, DP)
    last = tl.load(p_new + columns, mask=columns < D, other=0.0)
    tl.store(new + (NEAR.reach - 1) * width + columns, last, mask=columns < D)


@triton.jit
def window_halves(queries, p_q, b_phi1, b_phi2, window, G: tl.constexpr, NEAR: tl.constexpr):
    """The halves of G queries at `p_q` for products with a window's keys; x, y: the queries' features."""
    dtype: tl.constexpr = p_q.dtype.element_ty
    if NEAR.softmax:
        C: tl.constexpr = b_phi1.shape[0]
        b_q1 = load_rows(p_q, queries.row, G, C, NEAR.half, NEAR.padded_half).to(tl.float32)
        b_q2 = load_rows(p_q + NEAR.half, queries.row, G, C, NEAR.width - NEAR.half, NEAR.padded_half)
        b_q2 = b_q2.to(tl.float32)
        if NEAR.rotary:
            # Queries are at angle 0. Its cosine in the table is the rotation's common factor of all vectors.
            common_factor = tl.load(window.table + NEAR.reach * 2 * NEAR.half)
            b_q1, b_q2 = b_q1 * common_factor, b_q2 * common_factor
    else:
        b_q1, b_q2 = b_phi1, b_phi2
    return rounded(b_q1, dtype), rounded(b_q2, dtype)


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
    merge_params,
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

    queries (B, H_kv, G, D), key, value (B, H_kv, 1, .), and the gates (B, H_kv, G, 1) of `merge_params` are `Rows`.
    window: the tail, with the angles of its tokens and of the new one, which is at angle 0. States have the layout of
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
    position = tl.load(positions + batch.to(tl.int64) * positions_batch)
    goes_on, sees_far = position > 0, position >= NEAR.reach
    ends = (position % B == B - 1) & (position >= NEAR.reach - 1)
    oldest = tl.maximum(position // B - (NEAR.blocks - 1), 0) * B
    before = (position - oldest).to(tl.int32)
    rows = tl.arange(0, C)
    p_q = head_ptr(queries, batch, kv)
    p_new_k, p_new_v = head_ptr(key, batch, kv), head_ptr(value, batch, kv) + column
    p_tail_k, p_tail_v = head_ptr(window.keys, batch, kv), head_ptr(window.v, batch, kv) + column
    projection = matrix + kv * matrix_head
    dtype: tl.constexpr = p_q.dtype.element_ty

    b_phi1, b_phi2, q_log_scale = phi(p_q, queries.row, G, projection, None, C, PHI)
    b_q1, b_q2 = window_halves(queries, p_q, b_phi1, b_phi2, window, G, NEAR)
    near = tl.zeros((C, BV), tl.float32)
    den = tl.zeros((C,), tl.float32)
    row_max = tl.full((C,), EMPTY if (NEAR.softmax or PHI.unbounded) else 0.0, tl.float32)
    tiles = tl.cdiv(before, BK)
    for number in range(0, tiles + 1):
        # After the tiles of the tail comes the token itself.
        is_new_token = number == tiles
        at = tl.where(is_new_token, NEAR.reach, NEAR.reach - before + number * BK)
        num_valid = tl.where(is_new_token, 1, NEAR.reach - at)
        p_k = tl.where(is_new_token, p_new_k, p_tail_k + at.to(tl.int64) * window.keys.row)
        p_v = tl.where(is_new_token, p_new_v, p_tail_v + at.to(tl.int64) * window.v.row)
        b_k1, b_k2, logs = window_tile(
            p_k, window.keys.row, num_valid, window, at, projection, None, BK, NEAR, PHI
        )
        b_v = load_rows(p_v, window.v.row, num_valid, BK, V - column, BV)
        b_s = scores(b_q1, b_q2, b_k1, b_k2, dtype, NEAR, PHI)
        mask = (tl.arange(0, BK) < num_valid)[None, :]
        b_p, scale_old, row_max = online_softmax_step(
            b_s * NEAR.softmax_scale_log2 if NEAR.softmax else logs[None, :], b_s, row_max, mask, NEAR, PHI
        )
        near = near * scale_old[:, None] + tl.dot(
            rounded(b_p, dtype), rounded(b_v, dtype), input_precision="tf32x3"
        )
        den = den * scale_old + tl.sum(b_p, 1)

    log = tl.load(far_logs + head)
    landmark_phi1 = tl.zeros((RP, MP), tl.float32)
    landmark_phi2 = landmark_phi1
    logs = tl.full((RP,), EMPTY, tl.float32)
    landmark_v = tl.zeros((RP, BV), tl.float32)
    token_counts = tl.zeros((RP,), tl.float32)
    if ends:
        p_landmarks = landmarks + (head * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (
            R * PHI.width
        )
        tokens = tokens_to_pool(p_tail_k, window.keys.row, p_new_k, PHI.width, BP, PHI.padded_width, NEAR)
        pool = load_pool(pools.of_keys + kv * pools.head, R, RP, B, BP)
        store_landmarks(p_landmarks, pooled(tokens, pool, dtype), R, PHI.width)
        tl.debug_barrier()
        landmark_phi1, landmark_phi2, logs = phi(p_landmarks, PHI.width, R, projection, None, RP, PHI)
        tokens = tokens_to_pool(p_tail_v, window.v.row, p_new_v, V - column, BP, BV, NEAR)
        pool = load_pool(pools.of_values + kv * pools.head, R, RP, B, BP)
        landmark_v = tl.trans(pooled(tokens, pool, dtype))
        token_count = B / R * (1.0 if far_mass is None else tl.exp(tl.load(far_mass + kv).to(tl.float32)))
        token_counts = tl.where(tl.arange(0, RP) < R, token_count, 0.0)

    added = tl.where(token_counts != 0, logs, EMPTY)
    # The token that ends a block reads the state before it decays.
    kept = log + tl.load(decay + head) if PHI.decays else log
    scale_old, factors, new_log = rescale_factors(kept, added, goes_on, PHI.unbounded)
    token_counts *= factors
    ones = tl.full((RP,), 1.0, tl.float32)
    half: tl.constexpr = PHI.rows * (V + 1)
    state = head.to(tl.int64) * (half * (2 if PHI.has_two_halves else 1))
    b_state, b_norm = load_half(far_sums + state, goes_on, column, MP, PHI.rows, V, BV)
    far, far_den = read_half(b_phi1, b_state, b_norm, G)
    if ends:
        b_state, b_norm = add_tokens(
            b_state * scale_old, b_norm * scale_old, landmark_phi1, token_counts, landmark_v, ones, tl.float32
        )
    store_half(new_sums + state, b_state, b_norm, column, PHI.rows, V, BV)
    if PHI.has_two_halves:
        b_state, b_norm = load_half(far_sums + state + half, goes_on, column, MP, PHI.rows, V, BV)
        far2, far_den2 = read_half(b_phi2, b_state, b_norm, G)
        far += far2
        far_den += far_den2
        if ends:
            b_state, b_norm = add_tokens(
                b_state * scale_old,
                b_norm * scale_old,
                landmark_phi2,
                token_counts,
                landmark_v,
                ones,
                tl.float32,
            )
        store_half(new_sums + state + half, b_state, b_norm, column, PHI.rows, V, BV)
    if column == 0:
        tl.store(new_logs + head, new_log if PHI.unbounded else 0.0)

    far_den = tl.where(sees_far, far_den, 0.0)
    far = tl.where(sees_far, far, 0.0)
    far_log = tl.zeros((C,), tl.float32)
    if PHI.unbounded:
        # The scale of phi(q) cancels, except against a softmax window.
        far_log += tl.where(sees_far, log, EMPTY)
        if NEAR.softmax:
            far_log += q_log_scale
    logit, gamma = far_den, tl.zeros((C,), tl.float32)
    if NEAR.gated:
        gates = head_ptr(merge_params.gate, batch, kv) + rows * merge_params.gate.row
        logit = tl.load(gates, mask=rows < G, other=0.0).to(tl.float32)
        if merge_params.gate_weight is not None:
            b_p = merge_params.gate_weight + kv * (G * PHI.width)
            weight = load_rows(b_p, PHI.width, G, C, PHI.width, PHI.padded_width).to(tl.float32)
            tokens = load_rows(p_q, queries.row, G, C, PHI.width, PHI.padded_width).to(tl.float32)
            logit += tl.sum(tokens * weight, 1)
        # Without a far block, the output is exactly the near part.
        logit = tl.where(sees_far, logit, float("inf"))
    elif merge_params.far_weight is not None:
        gamma = tl.load(merge_params.far_weight + kv * G + rows, mask=rows < G, other=0.0).to(tl.float32)
    b_o, _spread, _factor, _lse, _share = merge_parts(
        near, den, row_max, far, far_den, far_log, logit, gamma, TINY, NEAR
    )
    store_rows(out + head.to(tl.int64) * (G * V) + column, V, G, b_o, V - column, BV)

    tail_offset = head.to(tl.int64) * NEAR.reach
    shift_tail(
        p_tail_v,
        window.v.row,
        p_new_v,
        new_values + tail_offset * V + column,
        V,
        V - column,
        BV,
        BK,
        NEAR,
    )
    if column == 0:
        shift_tail(
            p_tail_k,
            window.keys.row,
            p_new_k,
            new_keys + tail_offset * PHI.width,
            PHI.width,
            PHI.width,
            PHI.padded_width,
            BK,
            NEAR,
        )
