"""Triton kernels of composed FLuRKA: the merge of two normalized outputs, and gradients that come through pools.

With the outputs n_i of the window and f_i of the landmarks, and the window's share g_i, docs/formulas.md has

    o_i = g_i n_i + (1 - g_i) f_i

gated, g_i is the sigmoid of the gate's logits. Under one normalizer the logit is the difference of two log masses: the
log-sum-exp of the window, and the log of the sum of the landmarks' weights plus gamma. Gradients: with x_i =
do_i.(n_i - f_i), that of the logit is g_i (1 - g_i) x_i. Those of the two parts need no tensor of their own: the
kernels of both take do_i, with g_i in the log-sum-exp of the window and 1 - g_i in the factor of the landmarks.
"""

import triton
import triton.language as tl

from megakernel.ops.flurka_attention.arguments import load_gamma, load_gate
from megakernel.ops.flurka_attention.pool_kernels import tokens_of_block
from megakernel.ops.kernels.arguments import head_ptr, load_vector, queries_of_program, tile_ptr
from megakernel.ops.kernels.primitives import EMPTY, dot, load_rows, store_rows


@triton.jit
def load_output(rows, tile, TILING: tl.constexpr):
    """A tile (C, VP) of outputs or of their gradients, in float32."""
    num_valid = tile.end - tile.at
    C: tl.constexpr = TILING.chunk
    return load_rows(tile_ptr(rows, tile), rows.row, num_valid, C, TILING.values, TILING.padded_values).to(
        tl.float32
    )


@triton.jit
def merge_outputs(
    near,
    far,
    parts,
    merge_params,
    seq,
    out,
    merged,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs `Rows` (B, H, N, V), and what backward needs of the weights, `composed.MergeWeights`.

    parts: `composed.MergedParts`. The log-sum-exp of `merged` is that of the window less log2 g_i.

    Program: a tile of queries.
    """
    C: tl.constexpr = TILING.chunk
    LOG2E: tl.constexpr = 1.4426950408889634
    tile = queries_of_program(seq, TILING)
    vec_offset = tile.head.to(tl.int64) * seq.queries
    lse = load_vector(parts.lse + vec_offset, tile.at, tile.end, C)
    if NEAR.gated:
        logit = load_gate(merge_params, tile.head, tile.at, tile.first, seq.queries, C, NEAR)
    else:
        log_mass = load_vector(parts.log_mass + vec_offset, tile.at, tile.end, C)
        logit = lse / LOG2E - (log_mass + load_gamma(merge_params, tile.query_head))
        logit = tl.where(log_mass > EMPTY, logit, float("inf"))
    far_share = tl.sigmoid(-logit)
    b_n = load_output(near, tile, TILING)
    # The difference is 0 for equal outputs, whatever the rounding of the shares.
    b_o = b_n - (b_n - load_output(far, tile, TILING)) * far_share[:, None]
    store_rows(tile_ptr(out, tile), out.row, tile.end - tile.at, b_o, TILING.values, TILING.padded_values)
    inside, vec_idx = tile.rows < tile.end, vec_offset + tile.rows
    reciprocal = load_vector(parts.reciprocal + vec_offset, tile.at, tile.end, C)
    tl.store(merged.factor + vec_idx, far_share * reciprocal, mask=inside)
    tl.store(merged.far_share + vec_idx, far_share, mask=inside)
    # log2(1 + exp(-logit)) is -log2 g; past 80, exp would overflow.
    log_share = tl.where(logit > -80.0, tl.log2(1.0 + tl.exp(tl.minimum(-logit, 80.0))), -logit * LOG2E)
    tl.store(merged.lse + vec_idx, lse + log_share, mask=inside)


@triton.jit
def merge_outputs_backward(
    do,
    near,
    far,
    far_share,
    seq,
    dmerge,
    shift,
    TILING: tl.constexpr,
    NEAR: tl.constexpr,
    PHI: tl.constexpr,
):
    """`dmerge` (B, H, N) float32, the gradient of the gate's logits; under one normalizer, of gamma. Programs as above.

    shift: under one normalizer also g_i x_i (B, H, N) float32, do_i.o_i less do_i.f_i.
    """
    tile = queries_of_program(seq, TILING)
    vec_offset = tile.head.to(tl.int64) * seq.queries
    inside, vec_idx = tile.rows < tile.end, vec_offset + tile.rows
    difference = load_output(near, tile, TILING) - load_output(far, tile, TILING)
    x = tl.sum(load_output(do, tile, TILING) * difference, 1)
    share = load_vector(far_share + vec_offset, tile.at, tile.end, TILING.chunk)
    of_logit = share * (1.0 - share) * x
    if NEAR.gated:
        tl.store(dmerge + vec_idx, of_logit, mask=inside)
    else:
        tl.store(dmerge + vec_idx, -of_logit, mask=inside)
        tl.store(shift + vec_idx, (1.0 - share) * x, mask=inside)


@triton.jit
def pool_gradients(
    window,
    pools,
    seq,
    dlandmarks,
    dpooled,
    dk,
    dv,
    of_keys,
    of_values,
    EACH: tl.constexpr,
    NEAR: tl.constexpr,
    TILING: tl.constexpr,
    PHI: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
):
    """Write E^T dlandmarks to rows of dk, add F^T dpooled to those of dv, and sum gradients of E and F over blocks.

    dk, dv: `Rows` (B, H_kv, before + N, .); a token is in at most one block. of_keys, of_values: (B, H_kv, parts, R, B)
    float32. Program: EACH blocks of a key head.
    """
    R: tl.constexpr = TILING.rank
    B: tl.constexpr = NEAR.block_size
    VP: tl.constexpr = TILING.padded_values
    blocks = tl.cdiv(seq.length, B)
    parts = tl.cdiv(blocks, EACH)
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    batch, kv = head // seq.heads, head % seq.heads
    dtype: tl.constexpr = window.keys.pointer.dtype.element_ty
    pool = kv.to(tl.int64) * pools.head
    b_e = load_rows(pools.of_keys + pool, B, R, RP, B, BP)
    b_f = load_rows(pools.of_values + pool, B, R, RP, B, BP)
    total_e = tl.zeros((RP, BP), tl.float32)
    total_f = total_e
    for block in range(part * EACH, tl.minimum(part * EACH + EACH, blocks)):
        at, num_valid = tokens_of_block(window, seq, batch, block, NEAR)
        landmark_idx = (head.to(tl.int64) * blocks + block) * R
        b_dk = load_rows(dlandmarks + landmark_idx * PHI.width, PHI.width, R, RP, PHI.width, PHI.padded_width)
        b_dp = load_rows(dpooled + landmark_idx * TILING.values, TILING.values, R, RP, TILING.values, VP)
        p_k = head_ptr(window.keys, batch, kv) + at * window.keys.row
        b_k = load_rows(p_k, window.keys.row, num_valid, BP, PHI.width, PHI.padded_width)
        p_v = head_ptr(window.v, batch, kv) + at * window.v.row
        b_v = load_rows(p_v, window.v.row, num_valid, BP, TILING.values, VP)
        p_dv = head_ptr(dv, batch, kv) + at * dv.row
        b_dv = load_rows(p_dv, dv.row, num_valid, BP, TILING.values, VP).to(tl.float32)
        p_dk = head_ptr(dk, batch, kv) + at * dk.row
        store_rows(p_dk, dk.row, num_valid, dot(tl.trans(b_e), b_dk, dtype), PHI.width, PHI.padded_width)
        b_dv += dot(tl.trans(b_f), b_dp, dtype)
        store_rows(p_dv, dv.row, num_valid, b_dv, TILING.values, VP)
        total_e += dot(b_dk, tl.trans(b_k), dtype)
        total_f += dot(b_dp, tl.trans(b_v), dtype)
    offset = tl.program_id(0).to(tl.int64) * (R * B)
    store_rows(of_keys + offset, B, R, total_e, B, BP)
    store_rows(of_values + offset, B, R, total_f, B, BP)
