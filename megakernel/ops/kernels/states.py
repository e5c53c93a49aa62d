"""States of kernel attention over segments of a sequence, in Triton.

A sequence is cut into segments of many chunks. One launch sums each segment's features times values, all segments at
once; a second one turns these sums into the states that enter each segment. Whatever reads a state then runs over all
segments at once too and carries the state through its own chunks, so that one long sequence fills the device and memory
holds one state per segment, never one per chunk.

Backward is the same the other way: what queries add to the gradient of a state travels from the end to the start.

Layout of states: sums (B, H_kv, segments, FP, VP), their normalizers (B, H_kv, segments, FP) and log scales (B, H_kv,
segments) float32; the one that leaves the sequence has no dimension of segments. FP holds the MP features of each half.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, rounded


@triton.jit
def first_token(starts, batch, place, length, start):
    """The place where the document of the token at `place` starts, negative where it began before the sequence.

    starts: (B, N) int32, or None: all tokens are of one document, which began at `start`.
    """
    if starts is not None:
        # Behind the last token its document goes on.
        return tl.load(starts + batch.to(tl.int64) * length + tl.minimum(place, length - 1))
    return tl.zeros_like(place) + start


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
def largest_of(logs):
    """The largest of (C,)."""
    # As a column: Triton 3.7 compiles no sum or maximum of a vector that a product gave for compute capability 10.0.
    return tl.max(logs[:, None], 0).item()


@triton.jit
def add_tokens(tile, norm, features, weights, columns, numbers, dtype: tl.constexpr):
    """Half a state plus features (C, MP), `weights` (C,) times, times columns (C, BV), and numbers (C,) for `norm`.

    The weights go to the features, rounded once for both: where a token's column and number cancel, they still do.
    """
    weighed = rounded(features.to(tl.float32) * weights[:, None], dtype)
    tile += dot(tl.trans(weighed), columns, dtype)
    return tile, norm + tl.sum(weighed.to(tl.float32) * numbers[:, None], 0)


# Of each number of segments there would be a variant for 1, for multiples of 16 and for the others.
@triton.jit(do_not_specialize=["length", "start", "segments"])
def pass_states(
    added,
    entering_norms,
    entering_logs,
    first,
    last,
    starts,
    decays,
    entered,
    along,
    length,
    start,
    heads,
    segments,
    SEGMENT: tl.constexpr,
    FP: tl.constexpr,
    VP: tl.constexpr,
    BF: tl.constexpr,
    REVERSE: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Turn what segments add into the states that enter them. Program: (key head, block of features).

    Sums are turned in place, a number by the one thread that has it. Normalizers and log scales are loaded by several
    warps, one of which would store over what another is about to load: they go elsewhere.

    The states enter from the left, or with REVERSE from the right, the first one empty where `first` is None. What
    leaves the sequence goes to `last`; without `entering_norms` nothing else is kept, and what segments add stays.
    added, first, last: sums, normalizers and log scales. decays: (B, H_kv, segments) log of what a segment leaves of
    the state that enters it, None of states that do not decay. Log scales are relative to where a segment begins.

    Given the states `entered` from the left, what passes from the right is multiplied with them: `along` (B, H_kv,
    programs, segments) is what a change of all that enters each segment by a factor changes.
    """
    sums, norms, logs = added
    head = tl.program_id(0)
    batch = head // heads
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    d = tl.arange(0, VP)
    within = f[:, None] * VP + d[None, :]
    if first is not None:
        tile = tl.load(first[0] + head.to(tl.int64) * FP * VP + within)
        norm = tl.load(first[1] + head.to(tl.int64) * FP + f)
        log = tl.load(first[2] + head)
    else:
        tile = tl.zeros((BF, VP), tl.float32)
        norm = tl.zeros((BF,), tl.float32)
        log = EMPTY if UNBOUNDED else 0.0
    for step in range(segments):
        segment = segments - 1 - step if REVERSE else step
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, length)
        oldest = first_token(starts, batch, end - 1, length, start)
        entry = head.to(tl.int64) * segments + segment
        more = tl.load(sums + entry * FP * VP + within).to(tl.float32)
        added_norm = tl.load(norms + entry * FP + f)
        decay = 0.0 if decays is None else tl.load(decays + entry)
        if REVERSE:
            log += decay
        if entering_norms is not None:
            tl.store(sums + entry * FP * VP + within, rounded(tile, sums.dtype.element_ty))
            tl.store(entering_norms + entry * FP + f, norm)
            tl.store(entering_logs + entry, log)
        alive = oldest < begin
        if UNBOUNDED:
            added_log = tl.load(logs + entry)
            kept = tl.where(alive, log, EMPTY)
            log = tl.maximum(kept, added_log)
            shrink = tl.where(alive, tl.exp(kept - log), 0.0)
            grow = tl.exp(added_log - log)
        else:
            shrink = tl.where(alive, 1.0, 0.0)
            grow = 1.0
        tile = tile * shrink + more * grow
        norm = norm * shrink + added_norm * grow
        if along is not None:
            before = tl.load(entered[0] + entry * FP * VP + within).to(tl.float32)
            product = tl.sum(tile * before) + tl.sum(norm * tl.load(entered[1] + entry * FP + f))
            product *= tl.exp(log + tl.load(entered[2] + entry))
            part = head.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            tl.store(along + part * segments + segment, product)
        if not REVERSE:
            log += decay
    entry = head.to(tl.int64)
    tl.store(last[0] + entry * FP * VP + within, tile)
    tl.store(last[1] + entry * FP + f, norm)
    tl.store(last[2] + entry, log)
