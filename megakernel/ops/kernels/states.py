"""The scan of kernel attention's states over the segments of a sequence, in Triton.

A sequence is split into segments of many chunks. One launch sums features times values of all segments in parallel; a
second one scans these sums into the states that enter the segments. Kernels that read states then also run over all
segments in parallel, so one long sequence fills the GPU, and memory holds one state per segment, never one per chunk.

Backward does the same in reverse: what queries add to the gradient of a state is scanned from the end to the start.

Layout of states: sums (B, H_kv, segments, FP, VP), normalizers (B, H_kv, segments, FP) and float32 log scales (B, H_kv,
segments); the final state has no dimension of segments. FP holds the MP features of each half.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.primitives import EMPTY, dot, rounded


@triton.jit
def document_start(starts, batch, token_idx, length, start):
    """Index of the first token of the document of `token_idx`, negative if it began before the sequence.

    starts: (B, N) int32, or None if all tokens belong to one document, which started at `start`.
    """
    if starts is not None:
        # Indices past the last token belong to its document.
        return tl.load(starts + batch.to(tl.int64) * length + tl.minimum(token_idx, length - 1))
    return tl.zeros_like(token_idx) + start


@triton.jit
def rescale_factors(log, logs, alive, UNBOUNDED: tl.constexpr):
    """Factors of a state (log scale `log`, dropped unless `alive`) and of additions (C,), and the new log scale.

    Missing additions have log scale EMPTY and weight 0; if nothing exists, their factor is exp(0).
    """
    if UNBOUNDED:
        kept = tl.where(alive, log, EMPTY)
        new_max = tl.maximum(kept, tl.max(logs, 0))
        return tl.where(alive, tl.exp(kept - new_max), 0.0), tl.exp(logs - new_max), new_max
    return tl.where(alive, 1.0, 0.0), tl.zeros_like(logs) + 1.0, log


@triton.jit
def largest_of(logs):
    """The maximum of (C,)."""
    # As a column: for compute capability 10.0, Triton 3.7 cannot reduce a vector that comes from a matrix product.
    return tl.max(logs[:, None], 0).item()


TERMS = tl.constexpr(16)
"""Columns of the narrowest matrix product that `tl.dot` takes."""


@triton.jit
def empty_norm(MP: tl.constexpr, dtype: tl.constexpr):
    """What `add_tokens` adds numbers to: (MP,), or in bfloat16 (MP, TERMS)."""
    return tl.zeros((MP, TERMS), tl.float32) if dtype == tl.bfloat16 else tl.zeros((MP,), tl.float32)


@triton.jit
def sum_of_norm(norm, dtype: tl.constexpr):
    """The normalizer (MP,)."""
    return tl.sum(norm, 1) if dtype == tl.bfloat16 else norm


@triton.jit
def split_bf16x3(x, dtype: tl.constexpr):
    """(C, TERMS): x (C,) float32 as sums of three columns that bfloat16 represents exactly, the others 0.

    Bits below 2^-133 are lost.
    """
    column = tl.arange(0, TERMS)[None, :]
    first = rounded(x, dtype).to(tl.float32)
    second = rounded(x - first, dtype).to(tl.float32)
    third = x - first - second
    parts = tl.where(column == 1, second[:, None], tl.where(column == 2, third[:, None], 0.0))
    return tl.where(column == 0, first[:, None], parts)


@triton.jit
def add_tokens(b_state, b_norm, features, weights, b_v, v_norm, dtype: tl.constexpr):
    """Add features (C, MP) * weights (C,) times b_v (C, BV) to half a state, and times v_norm (C,) to its `b_norm`.

    The weighted features are rounded once for both sums, so that a token's column and number still cancel. In bfloat16
    the second sum is also a matrix product: otherwise warps would exchange partial sums in every step. (float16 cannot
    hold all numbers.)
    """
    b_phi = rounded(features.to(tl.float32) * weights[:, None], dtype)
    b_state += dot(tl.trans(b_phi), b_v, dtype)
    if dtype == tl.bfloat16:
        b_norm += dot(tl.trans(b_phi), split_bf16x3(v_norm, dtype), dtype)
    else:
        b_norm += tl.sum(b_phi.to(tl.float32) * v_norm[:, None], 0)
    return b_state, b_norm


# Otherwise Triton compiles variants for 1, for multiples of 16, and for other numbers of segments.
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
    dlog_scale,
    length,
    start,
    heads,
    segments,
    SEGMENT: tl.constexpr,
    FP: tl.constexpr,
    VP: tl.constexpr,
    BF: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Scan the sums of segments into the states that enter them. Program: (key head, block of features).

    Sums are overwritten in place: the program has loaded all of a segment's before it overwrites them. Normalizers and
    log scales are loaded by several warps or programs, which would race with in-place stores, so they go to separate
    buffers.

    States enter from the left, or with REVERSE from the right; the first one is empty if `first` is None. The final
    state goes to `last`; without `entering_norms` nothing else is stored, and the sums stay. added, first, last: sums,
    normalizers and log scales. decays: (B, H_kv, segments) total log decay of each segment, or None. Log scales are
    relative to the start of a segment.

    Given the states that `entered` segments from the left, a REVERSE scan multiplies them with the states from the
    right: `dlog_scale` (B, H_kv, programs, segments) are parts of the gradients of the log scales of those states.
    """
    sums, norms, logs = added
    head = tl.program_id(0)
    batch = head // heads
    f = tl.program_id(1) * BF + tl.arange(0, BF)
    d = tl.arange(0, VP)
    offsets = f[:, None] * VP + d[None, :]
    if first is not None:
        b_state = tl.load(first[0] + head.to(tl.int64) * FP * VP + offsets)
        b_norm = tl.load(first[1] + head.to(tl.int64) * FP + f)
        log = tl.load(first[2] + head)
    else:
        b_state = tl.zeros((BF, VP), tl.float32)
        b_norm = tl.zeros((BF,), tl.float32)
        log = EMPTY if UNBOUNDED else 0.0
    # Pipelined: one state at a time would wait for memory at every step.
    for step in tl.range(segments, num_stages=STAGES):
        segment = segments - 1 - step if REVERSE else step
        begin = segment * SEGMENT
        end = tl.minimum(begin + SEGMENT, length)
        oldest = document_start(starts, batch, end - 1, length, start)
        entry = head.to(tl.int64) * segments + segment
        b_added = tl.load(sums + entry * FP * VP + offsets).to(tl.float32)
        added_norm = tl.load(norms + entry * FP + f)
        decay = 0.0 if decays is None else tl.load(decays + entry)
        if REVERSE:
            log += decay
        if entering_norms is not None:
            tl.store(sums + entry * FP * VP + offsets, rounded(b_state, sums.dtype.element_ty))
            tl.store(entering_norms + entry * FP + f, b_norm)
            tl.store(entering_logs + entry, log)
        alive = oldest < begin
        if UNBOUNDED:
            added_log = tl.load(logs + entry)
            kept = tl.where(alive, log, EMPTY)
            log = tl.maximum(kept, added_log)
            scale_old = tl.where(alive, tl.exp(kept - log), 0.0)
            scale_new = tl.exp(added_log - log)
        else:
            scale_old = tl.where(alive, 1.0, 0.0)
            scale_new = 1.0
        b_state = b_state * scale_old + b_added * scale_new
        b_norm = b_norm * scale_old + added_norm * scale_new
        if dlog_scale is not None:
            b_entered = tl.load(entered[0] + entry * FP * VP + offsets).to(tl.float32)
            b_dot = tl.sum(b_state * b_entered) + tl.sum(b_norm * tl.load(entered[1] + entry * FP + f))
            b_dot *= tl.exp(log + tl.load(entered[2] + entry))
            program = head.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            tl.store(dlog_scale + program * segments + segment, b_dot)
        if not REVERSE:
            log += decay
    entry = head.to(tl.int64)
    tl.store(last[0] + entry * FP * VP + offsets, b_state)
    tl.store(last[1] + entry * FP + f, b_norm)
    tl.store(last[2] + entry, log)
