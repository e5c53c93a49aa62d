"""Triton kernel of a decoding step: one token per sequence, for many sequences in one launch."""

import triton
import triton.language as tl

from megakernel.ops.kernels.feature_maps import phi
from megakernel.ops.kernels.primitives import EMPTY, store_rows
from megakernel.ops.kernels.states import rescale_factors


@triton.jit
def row_of(x, row):
    """Row `row` of a tile (C, M), as (M,)."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == row)[:, None], x, 0.0), 0)


@triton.jit
def offsets_of_half(column, C: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of a block of columns (C, BV) of half a state, and of its normalizer (C,)."""
    m, columns = tl.arange(0, C), column + tl.arange(0, BV)
    inside = (m < M)[:, None] & (columns < V)[None, :]
    return m[:, None] * (V + 1) + columns[None, :], inside, m * (V + 1) + V, m < M


@triton.jit
def load_half(sums, alive, column, C: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """A block of columns (C, BV) of half a state and its normalizer (C,); zeros if not `alive`."""
    offsets, inside, normalizer, rows = offsets_of_half(column, C, M, V, BV)
    b_state = tl.load(sums + offsets, mask=inside & alive, other=0.0)
    return b_state, tl.load(sums + normalizer, mask=rows & alive, other=0.0)


@triton.jit
def store_half(new_sums, b_state, b_norm, column, M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """The inverse of `load_half`; only the program of the first columns stores the normalizer."""
    offsets, inside, normalizer, rows = offsets_of_half(column, b_state.shape[0], M, V, BV)
    tl.store(new_sums + offsets, b_state, mask=inside)
    if column == 0:
        tl.store(new_sums + normalizer, b_norm, mask=rows)


@triton.jit
def read_half(features, b_state, b_norm, G: tl.constexpr):
    """Products of the first G features (C, MP) with half a state: columns (C, BV) and the normalizer (C,)."""
    # With so few rows, tensor cores do not pay: they need the tile in shared memory, twice for split float32.
    b_outputs = tl.zeros((features.shape[0], b_state.shape[1]), tl.float32)
    for g in range(G):
        b_o = tl.sum(row_of(features, g)[:, None] * b_state, 0)
        b_outputs += tl.where((tl.arange(0, features.shape[0]) == g)[:, None], b_o[None, :], 0.0)
    return b_outputs, tl.sum(features * b_norm[None, :], 1)


@triton.jit
def step_half(
    features,
    sums,
    new_sums,
    alive,
    scale_old,
    b_v,
    weight,
    column,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """Add the key's features times `b_v` (BV,), and times `weight` for the normalizer, to half a state.

    features (C, MP) are those of the G queries, then of the key. Returns what the queries read from the new state, see
    `read_half`.
    """
    b_k = row_of(features, G)
    b_state, b_norm = load_half(sums, alive, column, features.shape[1], M, V, BV)
    b_state = b_state * scale_old + b_k[:, None] * b_v[None, :]
    b_norm = b_norm * scale_old + b_k * weight
    store_half(new_sums, b_state, b_norm, column, M, V, BV)
    return read_half(features, b_state, b_norm, G)


@triton.jit
def step(
    tokens,
    v,
    key_weights,
    matrix,
    sums,
    logs,
    out,
    new_sums,
    new_logs,
    positions,
    v_batch,
    v_head,
    matrix_head,
    heads,
    positions_batch,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, V) and the states (B, H_kv, F, V + 1) after adding the token.

    tokens (B, H_kv, G + 1, D) are the queries of a key head, then its key. States have the layout of `KernelState`: the
    normalizer is the last column, and a map's second half starts M rows after its first. A token at position 0 begins a
    new state; without positions, all states continue. Program: (key head of a sequence, block of values).
    """
    head = tl.program_id(0)
    row, kv = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    column = tl.program_id(1) * BV
    tokens += head.to(tl.int64) * (G + 1) * PHI.width
    matrix += kv * matrix_head
    alive = head >= 0
    if positions is not None:
        alive = tl.load(positions + row * positions_batch) > 0
    phi1, phi2, scales = phi(tokens, PHI.width, G + 1, matrix, None, C, PHI)

    weights = tl.where(tl.arange(0, C) == G, tl.load(key_weights + head) if WEIGHTED else 1.0, 0.0)
    added = tl.where(weights != 0, scales, EMPTY)
    scale_old, factors, log = rescale_factors(tl.load(logs + head), added, alive, PHI.unbounded)
    weight = tl.sum(weights * factors, 0)
    columns = column + tl.arange(0, BV)
    b_value = tl.load(v + row * v_batch + kv * v_head + columns, mask=columns < V, other=0.0)
    b_v = b_value.to(tl.float32) * weight
    half: tl.constexpr = PHI.rows * (V + 1)
    state = head.to(tl.int64) * (half * (2 if PHI.has_two_halves else 1))
    sums += state
    new_sums += state
    total, den = step_half(phi1, sums, new_sums, alive, scale_old, b_v, weight, column, G, PHI.rows, V, BV)
    if PHI.has_two_halves:
        total2, den2 = step_half(
            phi2, sums + half, new_sums + half, alive, scale_old, b_v, weight, column, G, PHI.rows, V, BV
        )
        total += total2
        den += den2
    if NORMALIZE:
        total *= tl.where(den == 0, 0.0, 1.0 / tl.where(den == 0, 1.0, den))[:, None]
    elif PHI.unbounded:
        total *= tl.exp(scales + log)[:, None]
    store_rows(out + head.to(tl.int64) * G * V + column, V, G, total, V - column, BV)
    if column == 0:
        tl.store(new_logs + head, log if PHI.unbounded else 0.0)
