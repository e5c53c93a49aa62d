"""Triton kernel of a decoding step: one token per sequence, for many sequences in one launch."""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, phi, store_rows
from megakernel.ops.kernels.states import scales_of_addition


@triton.jit
def row_of(x, row):
    """Row `row` of a tile (C, M), as (M,)."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == row)[:, None], x, 0.0), 0)


@triton.jit
def places_of_half(column, C: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of a block of columns (C, BV) of half a state, and of its normalizer (C,)."""
    m, columns = tl.arange(0, C), column + tl.arange(0, BV)
    inside = (m < M)[:, None] & (columns < V)[None, :]
    return m[:, None] * (V + 1) + columns[None, :], inside, m * (V + 1) + V, m < M


@triton.jit
def load_half(sums, alive, column, C: tl.constexpr, M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """A block of columns (C, BV) of half a state and its normalizer (C,); zeros if not `alive`."""
    places, inside, normalizer, rows = places_of_half(column, C, M, V, BV)
    tile = tl.load(sums + places, mask=inside & alive, other=0.0)
    return tile, tl.load(sums + normalizer, mask=rows & alive, other=0.0)


@triton.jit
def store_half(new_sums, tile, norm, column, M: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """The inverse of `load_half`; only the program of the first columns stores the normalizer."""
    places, inside, normalizer, rows = places_of_half(column, tile.shape[0], M, V, BV)
    tl.store(new_sums + places, tile, mask=inside)
    if column == 0:
        tl.store(new_sums + normalizer, norm, mask=rows)


@triton.jit
def read_half(features, tile, norm, G: tl.constexpr):
    """Products of the first G features (C, MP) with half a state: columns (C, BV) and the normalizer (C,)."""
    # With so few rows, tensor cores do not pay: they need the tile in shared memory, twice for split float32.
    total = tl.zeros((features.shape[0], tile.shape[1]), tl.float32)
    for g in range(G):
        read = tl.sum(row_of(features, g)[:, None] * tile, 0)
        total += tl.where((tl.arange(0, features.shape[0]) == g)[:, None], read[None, :], 0.0)
    return total, tl.sum(features * norm[None, :], 1)


@triton.jit
def step_half(
    features,
    sums,
    new_sums,
    alive,
    shrink,
    addition,
    weight,
    column,
    G: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    """Add the key's features times `addition` (BV,), and times `weight` for the normalizer, to half a state.

    features (C, MP) are those of the G queries, then of the key. Returns what the queries read from the new state, see
    `read_half`.
    """
    key = row_of(features, G)
    tile, norm = load_half(sums, alive, column, features.shape[1], M, V, BV)
    tile = tile * shrink + key[:, None] * addition[None, :]
    norm = norm * shrink + key * weight
    store_half(new_sums, tile, norm, column, M, V, BV)
    return read_half(features, tile, norm, G)


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
    a, b, scales = phi(tokens, PHI.width, G + 1, matrix, 0, C, PHI)

    weights = tl.where(tl.arange(0, C) == G, tl.load(key_weights + head) if WEIGHTED else 1.0, 0.0)
    added = tl.where(weights != 0, scales, EMPTY)
    shrink, factors, log = scales_of_addition(tl.load(logs + head), added, alive, PHI.unbounded)
    weight = tl.sum(weights * factors, 0)
    columns = column + tl.arange(0, BV)
    value = tl.load(v + row * v_batch + kv * v_head + columns, mask=columns < V, other=0.0)
    addition = value.to(tl.float32) * weight
    half: tl.constexpr = PHI.rows * (V + 1)
    state = head.to(tl.int64) * (half * (2 if PHI.two else 1))
    sums += state
    new_sums += state
    total, den = step_half(a, sums, new_sums, alive, shrink, addition, weight, column, G, PHI.rows, V, BV)
    if PHI.two:
        more, of_den = step_half(
            b, sums + half, new_sums + half, alive, shrink, addition, weight, column, G, PHI.rows, V, BV
        )
        total += more
        den += of_den
    if NORMALIZE:
        total *= tl.where(den == 0, 0.0, 1.0 / tl.where(den == 0, 1.0, den))[:, None]
    elif PHI.unbounded:
        total *= tl.exp(scales + log)[:, None]
    store_rows(out + head.to(tl.int64) * G * V + column, V, G, total, V - column, BV)
    if column == 0:
        tl.store(new_logs + head, log if PHI.unbounded else 0.0)
