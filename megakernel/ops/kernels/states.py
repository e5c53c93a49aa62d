"""States of kernel attention over segments of a row, in Triton.

A row is cut into segments of many chunks. One launch sums each segment's features times values, all segments at
once; a second one turns these sums into the states that enter each segment. Whatever reads a state then runs over all
segments at once too and carries the state through its own chunks, so that one long row fills the device and memory
holds one state per segment, never one per chunk.

Backward is the same the other way: what queries add to the gradient of a state travels from the end to the start.

Layout of states: sums (B, H_kv, segments + 1, FP, VP) float32, their normalizers (B, H_kv, segments + 1, FP) and log
scales (B, H_kv, segments + 1); the last entry is the one that leaves the row.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, phi, rounded


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
def load_state(sums, norms, logs, FP: tl.constexpr, VP: tl.constexpr, BV: tl.constexpr, column):
    """A state's tile (FP, BV), its normalizer (FP,) and log scale."""
    f = tl.arange(0, FP)
    tile = tl.load(sums + f[:, None] * VP + (column + tl.arange(0, BV))[None, :])
    return tile, tl.load(norms + f), tl.load(logs)


@triton.jit
def add_to_state(
    tile, norm, log, values, logs, columns, weights, alive, dtype: tl.constexpr, UNBOUNDED: tl.constexpr
):
    """The state (tile, norm, log) kept where `alive`, plus values (C, FP) exp(logs) times columns and weights.

    columns (C, BV) float32 are what is summed and weights (C,) their normalizers, both 0 for a token that adds
    nothing; `exists` in log scales follows from `logs`, which must be EMPTY for it.
    """
    if UNBOUNDED:
        kept = tl.where(alive, log, EMPTY)
        larger = tl.maximum(kept, tl.max(logs, 0))
        shrink = tl.where(alive, tl.exp(kept - larger), 0.0)
        factor = tl.exp(logs - larger)
        # A token that does not exist has no weight; where nothing exists its factor is exp(0).
        columns = columns * factor[:, None]
        weights = weights * factor
        log = larger
    else:
        shrink = tl.where(alive, 1.0, 0.0)
    added = dot(tl.trans(rounded(values, dtype)), columns, dtype)
    return tile * shrink + added, norm * shrink + tl.sum(values * weights[:, None], 0), log


@triton.jit
def write_keys(
    k,
    v,
    mass,
    starts,
    matrix,
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
    MAP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    FP: tl.constexpr,
    SCALE: tl.constexpr,
    COEFFICIENT: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """What each segment's keys add to the state that leaves it. Program: (segment of a key head, block of values)."""
    segment = tl.program_id(0) % segments
    head = tl.program_id(0) // segments
    row, kv = head // heads, head % heads
    column = tl.program_id(1) * BV
    k += row.to(tl.int64) * k_batch + kv.to(tl.int64) * k_head
    v += row.to(tl.int64) * v_batch + kv.to(tl.int64) * v_head + column
    mass += head.to(tl.int64) * length
    matrix += kv * M * D
    begin = segment * SEGMENT
    last = first_token(starts, row, tl.minimum(begin + SEGMENT, length) - 1, length, start, PACKED)

    tile = tl.zeros((FP, BV), tl.float32)
    norm = tl.zeros((FP,), tl.float32)
    log = EMPTY if UNBOUNDED else 0.0
    for at in range(begin, tl.minimum(begin + SEGMENT, length), C):
        rows = at + tl.arange(0, C)
        keys = load_rows(k, rows, k_row, length, D, DP)
        columns = load_rows(v, rows, v_row, length, V - column, BV).to(tl.float32)
        values, scales = phi(keys, matrix, low, MAP, D, DP, M, MP, SCALE, COEFFICIENT)
        weights = tl.where(rows >= last, load_mass(mass, rows, length, MASSES), 0.0)
        scales = tl.where(weights != 0, scales, EMPTY) if UNBOUNDED else scales
        tile, norm, log = add_to_state(
            tile,
            norm,
            log,
            values,
            scales,
            columns * weights[:, None],
            weights,
            True,
            k.dtype.element_ty,
            UNBOUNDED,
        )
    entry = head.to(tl.int64) * (segments + 1) + segment
    f = tl.arange(0, FP)
    tl.store(sums + (entry * FP + f[:, None]) * VP + (column + tl.arange(0, BV))[None, :], tile)
    if tl.program_id(1) == 0:
        tl.store(norms + entry * FP + f, norm)
        tl.store(logs + entry, log)


@triton.jit
def pass_states(
    sums,
    norms,
    logs,
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
    """Turn what segments add (in place) into the states that enter them. Program: (key head, block of features).

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
            tl.store(norms + entry * FP + f, norm)
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
    tl.store(norms + entry * FP + f, norm)
    tl.store(entering_logs + entry, log)
