"""Triton kernel of decoding: one token of many sequences enters their states and reads them, in one launch."""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, phi, store_rows
from megakernel.ops.kernels.states import scales_of_addition


@triton.jit
def row_of(x, row):
    """Row `row` of a tile (C, M), as (M,)."""
    return tl.sum(tl.where((tl.arange(0, x.shape[0]) == row)[:, None], x, 0.0), 0)


@triton.jit
def step_half(
    features,
    sums,
    new_sums,
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

    features (C, MP) are those of the G queries, and below them of the key. Returns what queries read from the new
    state: a block of columns (C, BV) and the normalizer (C,).
    """
    m = tl.arange(0, features.shape[1])
    columns = column + tl.arange(0, BV)
    key = row_of(features, G)
    inside = (m < M)[:, None] & (columns < V)[None, :]
    places = m[:, None] * (V + 1) + columns[None, :]
    normalizer = m * (V + 1) + V
    tile = tl.load(sums + places, mask=inside, other=0.0)
    tile = tile * shrink + key[:, None] * addition[None, :]
    tl.store(new_sums + places, tile, mask=inside)
    norm = tl.load(sums + normalizer, mask=m < M, other=0.0)
    norm = norm * shrink + key * weight
    if column == 0:
        tl.store(new_sums + normalizer, norm, mask=m < M)
    # Products of few rows: tensor cores would need the tile in shared memory, and a second time in shards for float32.
    total = tl.zeros((features.shape[0], BV), tl.float32)
    for g in range(G):
        read = tl.sum(row_of(features, g)[:, None] * tile, 0)
        total += tl.where((tl.arange(0, features.shape[0]) == g)[:, None], read[None, :], 0.0)
    return total, tl.sum(features * norm[None, :], 1)


@triton.jit
def step(
    tokens,
    v,
    mass,
    matrix,
    sums,
    logs,
    out,
    new_sums,
    new_logs,
    v_batch,
    v_head,
    matrix_head,
    heads,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    MASSES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PHI: tl.constexpr,
):
    """Outputs (B, H, V) and the states (B, H_kv, F, V + 1) with the token in them.

    tokens (B, H_kv, G + 1, D) float32 are the queries of a key head and, below them, its key. States are as
    `KernelState` has them: the normalizer is the last column, and a map's second half lies M rows below its first.
    Program: (key head of a sequence, block of values).
    """
    head = tl.program_id(0)
    row, kv = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    column = tl.program_id(1) * BV
    tokens += head.to(tl.int64) * (G + 1) * PHI.width
    matrix += kv * matrix_head
    a, b, scales = phi(tokens, PHI.width, G + 1, matrix, 0, C, PHI)

    weights = tl.where(tl.arange(0, C) == G, tl.load(mass + head) if MASSES else 1.0, 0.0)
    added = tl.where(weights != 0, scales, EMPTY)
    shrink, factors, log = scales_of_addition(tl.load(logs + head), added, True, PHI.unbounded)
    weight = tl.sum(weights * factors, 0)
    columns = column + tl.arange(0, BV)
    value = tl.load(v + row * v_batch + kv * v_head + columns, mask=columns < V, other=0.0)
    addition = value.to(tl.float32) * weight
    half: tl.constexpr = PHI.rows * (V + 1)
    state = head.to(tl.int64) * (half * (2 if PHI.two else 1))
    sums += state
    new_sums += state
    total, den = step_half(a, sums, new_sums, shrink, addition, weight, column, G, PHI.rows, V, BV)
    if PHI.two:
        more, of_den = step_half(
            b, sums + half, new_sums + half, shrink, addition, weight, column, G, PHI.rows, V, BV
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
