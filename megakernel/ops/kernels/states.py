"""States of kernel attention over segments of a row, in Triton.

A row is cut into segments of many chunks. One launch sums each segment's features times values, all segments at
once; a second one turns these sums into the states that enter each segment. Whatever reads a state then runs over all
segments at once too and carries the state through its own chunks, so that one long row fills the device and memory
holds one state per segment, never one per chunk.

Backward is the same the other way: what queries add to the gradient of a state travels from the end to the start.

Layout of states: sums (B, H_kv, segments + 1, FP, VP) float32, their normalizers (B, H_kv, segments + 1, FP) and log
scales (B, H_kv, segments + 1); the last entry is the one that leaves the row. FP holds the MP features of each half.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, rounded
from megakernel.ops.kernels.mixtures import phi_of_keys


@triton.jit
def share_of_program(segments, VP: tl.constexpr, BV: tl.constexpr):
    """Key head, segment and block of values of this program.

    Blocks of one segment stand beside each other: they read the same queries and keys, at about the same time, so that
    one of them brings these from memory and the others find them in the cache. One axis, because the second and third
    of a grid end at 65,535.
    """
    blocks: tl.constexpr = VP // BV
    program = tl.program_id(0)
    place = program // blocks
    return place // segments, place % segments, program % blocks


@triton.jit
def first_token(starts, row, place, length, start, PACKED: tl.constexpr):
    """The place where the document of the token at `place` starts, negative where it began before the row.

    starts: (B, N) int32 if PACKED; otherwise all tokens are of one document, which began at `start`.
    """
    if PACKED:
        # Behind the last token its document goes on.
        return tl.load(starts + row.to(tl.int64) * length + tl.minimum(place, length - 1))
    return tl.zeros_like(place) + start


@triton.jit
def load_mass(mass, rows, length, MASSES: tl.constexpr):
    """How often each key counts, (C,) float32; 0 behind the last one."""
    inside = rows < length
    if MASSES:
        return tl.load(mass + rows, mask=inside, other=0.0)
    return tl.where(inside, 1.0, 0.0)


@triton.jit
def load_state(sums, norms, column, half, MP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr):
    """Half a state: its tile (MP, BV) from a column on, and its normalizer (MP,)."""
    m = half * MP + tl.arange(0, MP)
    tile = tl.load(sums + (m[:, None] * VP + (column + tl.arange(0, BV))[None, :]))
    return tile, tl.load(norms + m)


@triton.jit
def store_state(tile, norm, sums, norms, column, half, MP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr):
    """The inverse of `load_state`; the first columns' program stores the normalizer."""
    m = half * MP + tl.arange(0, MP)
    tl.store(sums + (m[:, None] * VP + (column + tl.arange(0, BV))[None, :]), tile)
    if column == 0:
        tl.store(norms + m, norm)


@triton.jit
def scales_of_addition(log, logs, alive, UNBOUNDED: tl.constexpr):
    """What a state (log scale `log`, kept where `alive`) and additions (C,) are multiplied by, and the new log scale.

    An addition that does not exist has log scale EMPTY, and weight 0: where nothing exists its factor is exp(0).
    """
    if UNBOUNDED:
        kept = tl.where(alive, log, EMPTY)
        larger = tl.maximum(kept, tl.max(logs, 0))
        return tl.where(alive, tl.exp(kept - larger), 0.0), tl.exp(logs - larger), larger
    return tl.where(alive, 1.0, 0.0), tl.zeros_like(logs) + 1.0, log


@triton.jit
def add_tokens(tile, norm, shrink, features, columns, weights, dtype: tl.constexpr):
    """Half a state, shrunk, plus features (C, MP) times columns (C, BV), and times weights (C,) for its normalizer."""
    tile = tile * shrink + dot(tl.trans(features), columns, dtype)
    return tile, norm * shrink + tl.sum(features.to(tl.float32) * weights[:, None], 0)


@triton.jit
def write_keys(
    k,
    v,
    mass,
    starts,
    matrix,
    priors,
    sums,
    norms,
    logs,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    length,
    start,
    heads,
    segments,
    low,
    SEGMENT: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    MASSES: tl.constexpr,
    KEYS: tl.constexpr,
    PHI: tl.constexpr,
):
    """What each segment's keys add to the state that leaves it. Program: `share_of_program`."""
    MP: tl.constexpr = PHI.padded_rows
    head, segment, block = share_of_program(segments, VP, BV)
    row, kv = head // heads, head % heads
    column = block * BV
    dtype: tl.constexpr = k.dtype.element_ty
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    mass += head.to(tl.int64) * length
    matrix += kv * PHI.rows * PHI.width
    priors += kv * KEYS
    begin = segment * SEGMENT
    end = tl.minimum(begin + SEGMENT, length)
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    last = first_token(starts, row, end - 1, length, start, PACKED)

    tile = tl.zeros((MP, BV), tl.float32)
    tile2 = tile
    norm = tl.zeros((MP,), tl.float32)
    norm2 = norm
    log = EMPTY if PHI.unbounded else 0.0
    for at in range(begin, end, C):
        rows, left = at + tl.arange(0, C), length - at
        columns = load_rows(v + at * v_far, v_row, left, C, V - column, BV).to(tl.float32)
        keys = k + at * k_far
        a, b, scales = phi_of_keys(
            keys,
            k_row,
            left,
            matrix,
            low,
            priors,
            KEYS,
            C,
            PHI,
        )
        weights = tl.where(rows >= last, load_mass(mass, rows, length, MASSES), 0.0)
        scales = tl.where(weights != 0, scales, EMPTY) if PHI.unbounded else scales
        shrink, factors, log = scales_of_addition(log, scales, True, PHI.unbounded)
        weights *= factors
        columns *= weights[:, None]
        tile, norm = add_tokens(tile, norm, shrink, rounded(a, dtype), columns, weights, dtype)
        if PHI.two:
            tile2, norm2 = add_tokens(tile2, norm2, shrink, rounded(b, dtype), columns, weights, dtype)
    entry = head.to(tl.int64) * (segments + 1) + segment
    FP: tl.constexpr = PHI.padded_features
    sums += entry * FP * VP
    norms += entry * FP
    store_state(tile, norm, sums, norms, column, 0, PHI.padded_rows, VP, BV)
    if PHI.two:
        store_state(tile2, norm2, sums, norms, column, 1, PHI.padded_rows, VP, BV)
    if column == 0:
        tl.store(logs + entry, log)


@triton.jit
def pass_states(
    sums,
    norms,
    logs,
    entering_norms,
    entering_logs,
    first_sums,
    first_norms,
    first_logs,
    starts,
    length,
    start,
    heads,
    segments,
    SEGMENT: tl.constexpr,
    FP: tl.constexpr,
    VP: tl.constexpr,
    BF: tl.constexpr,
    PACKED: tl.constexpr,
    FIRST: tl.constexpr,
    REVERSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Turn what segments add into the states that enter them. Program: (key head, block of features).

    Sums are turned in place, a number by the one thread that has it. Normalizers and log scales are loaded by several
    warps, one of which would store over what another is about to load: they go elsewhere.

    The states enter from the left, or with REVERSE from the right; the first one is empty without FIRST. Without
    CAUSAL nothing is kept but the total, as the last entry.
    """
    head = tl.program_id(0)
    row = head // heads
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    d = tl.arange(0, VP)
    within = f[:, None] * VP + d[None, :]
    if FIRST:
        tile = tl.load(first_sums + head.to(tl.int64) * FP * VP + within)
        norm = tl.load(first_norms + head.to(tl.int64) * FP + f)
        log = tl.load(first_logs + head)
    else:
        tile = tl.zeros((BF, VP), tl.float32)
        norm = tl.zeros((BF,), tl.float32)
        log = EMPTY if UNBOUNDED else 0.0
    for step in range(segments):
        segment = segments - 1 - step if REVERSE else step
        begin = segment * SEGMENT
        last = first_token(starts, row, tl.minimum(begin + SEGMENT, length) - 1, length, start, PACKED)
        entry = head.to(tl.int64) * (segments + 1) + segment
        added = tl.load(sums + entry * FP * VP + within)
        added_norm = tl.load(norms + entry * FP + f)
        if CAUSAL:
            tl.store(sums + entry * FP * VP + within, tile)
            tl.store(entering_norms + entry * FP + f, norm)
            tl.store(entering_logs + entry, log)
        alive = (last < begin) | (not CAUSAL)
        if UNBOUNDED:
            added_log = tl.load(logs + entry)
            kept = tl.where(alive, log, EMPTY)
            log = tl.maximum(kept, added_log)
            shrink = tl.where(alive, tl.exp(kept - log), 0.0)
            grow = tl.exp(added_log - log)
        else:
            shrink = tl.where(alive, 1.0, 0.0)
            grow = 1.0
        tile = tile * shrink + added * grow
        norm = norm * shrink + added_norm * grow
    entry = head.to(tl.int64) * (segments + 1) + segments
    tl.store(sums + entry * FP * VP + within, tile)
    tl.store(entering_norms + entry * FP + f, norm)
    tl.store(entering_logs + entry, log)
