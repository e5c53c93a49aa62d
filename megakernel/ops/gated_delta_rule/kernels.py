"""Triton kernels of the gated delta rule, over chunks of C tokens.

With S the state that enters a chunk, A_i the product of its decays up to token i, P_ij = A_i / A_j for j <= i (0 across
documents), L_i = A_C / A_i, b the strengths, Q the queries divided by sqrt(d), T and U as in docs/formulas.md, 9.6:

    X = (I + T)^-1     U = X diag(b) (V - diag(A) K S)     S' = A_C S + (diag(L) K)^T U
    O = (P * (Q K^T)) U + diag(A) Q S

X does not depend on states: `solve` computes it for all chunks in parallel, and only X and the inputs are saved for
backward. `pass_on` goes from chunk to chunk, `read` runs over all chunks in parallel. Backward, with dS' the gradient
of the outgoing state and R = X^T ((P * (Q K^T))^T dO + diag(L) K dS'), the gradient of b (V - diag(A) K S):

    dS = A_C dS' + (diag(A) Q)^T dO - (diag(b A) K)^T R     dV = diag(b) R     db_i = R_i.U_i / b_i     dT = -R U^T

`bwd_read` computes the first term of R for all chunks in parallel, `bwd_pass_on` goes from the last chunk to the first,
and `bwd_queries` and `bwd_keys` compute the gradients of tokens for all chunks in parallel. In `pass_on` and its
backward, columns of values are independent, so programs split them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernels.arguments import head_ptr, load_vector
from megakernel.ops.kernels.launch import Rows
from megakernel.ops.kernels.primitives import dot, exp, load_rows, rounded, store_rows
from megakernel.ops.kernels.states import document_start

CHUNK = 64
"""C"""

SIZE = tl.constexpr(CHUNK)
HALF = tl.constexpr(CHUNK // 2)
"""Tokens per triangular system that is inverted in one piece."""


class DeltaShape(NamedTuple):
    """Compile-time sizes of a call."""

    width: int
    """d"""

    padded_width: int
    values: int
    """D"""

    columns: int
    """Columns of values per program or per loop step."""

    group: int
    """Query heads per key head."""

    scale: float
    """1 / sqrt(d)."""


class DeltaInputs(NamedTuple):
    """The inputs of the op."""

    q: Rows
    k: Rows
    v: Rows
    log_decay: Any
    """(B, H_kv, N) float32."""

    strength: Any
    """(B, H_kv, N) float32, above 0."""

    starts: Any
    """(B, N) int32, where each token's document starts, or None."""


@triton.jit
def chunk_of(length):
    """The program's head, and the first token of its chunk: all chunks of a head, then those of the next.

    Both are in axis 0, because the others have at most 65,535 programs.
    """
    chunks = tl.cdiv(length, SIZE)
    return tl.program_id(0) // chunks, tl.program_id(0) % chunks * SIZE


@triton.jit
def row_ptr(rows, batch, head, at):
    """Pointer to the row of token `at` of a head."""
    return head_ptr(rows, batch, head) + tl.cast(at, tl.int64) * rows.row


@triton.jit
def load_qk(rows, batch, head, at, length, SHAPE: tl.constexpr):
    """C queries or keys of a head from token `at` on, (C, DP)."""
    start = row_ptr(rows, batch, head, at)
    return load_rows(start, rows.row, length - at, SIZE, SHAPE.width, SHAPE.padded_width)


@triton.jit
def load_v(rows, batch, head, at, length, column, SHAPE: tl.constexpr):
    """Columns (C, V) of the values, or of gradients of outputs, of a head from token `at` on."""
    start = row_ptr(rows, batch, head, at) + column
    return load_rows(start, rows.row, length - at, SIZE, SHAPE.values - column, SHAPE.columns)


@triton.jit
def load_columns(x, row_idx, num_valid, column, SHAPE: tl.constexpr):
    """Columns (C, V) of C rows of D elements of `x`, from row `row_idx` on."""
    start = x + row_idx * SHAPE.values + column
    return load_rows(start, SHAPE.values, num_valid, SIZE, SHAPE.values - column, SHAPE.columns)


@triton.jit
def store_columns(x, row_idx, num_valid, column, tile, SHAPE: tl.constexpr):
    """The inverse of `load_columns`."""
    start = x + row_idx * SHAPE.values + column
    store_rows(start, SHAPE.values, num_valid, tile, SHAPE.values - column, SHAPE.columns)


@triton.jit
def load_state_columns(states, entry, column, SHAPE: tl.constexpr):
    """Columns (DP, V) of a state in memory."""
    offsets, mask = state_offsets(entry, column, SHAPE)
    return tl.load(states + offsets, mask=mask, other=0.0)


@triton.jit
def load_per_token(x, entry, at, length, C: tl.constexpr):
    """The elements of `x` for C tokens of a key head from `at` on."""
    return load_vector(x + entry.to(tl.int64) * length, at, length, C)


@triton.jit
def decays_of(tokens, entry, batch, at, length, start):
    """For the C tokens from `at` on: their places, log A, where their documents start, A, L, and A_C.

    A is 0 for tokens that do not see the entering state, L for tokens that are not in the outgoing state.
    """
    n = at + tl.arange(0, SIZE)
    each = load_per_token(tokens.log_decay, entry, at, length, SIZE)
    logs = tl.cumsum(each, 0)
    # The last element of `logs` rather than a separate sum, so that L of the last token is exactly 1.
    total = tl.sum(tl.where(n == at + SIZE - 1, logs, 0.0), 0)
    first = document_start(tokens.starts, batch, n, length, start)
    newest = document_start(tokens.starts, batch, tl.minimum(at + SIZE, length) - 1, length, start)
    kept = tl.where(first < at, exp(logs), 0.0)
    left = tl.where(n >= newest, exp(total - logs), 0.0)
    whole = tl.where(newest < at, tl.exp(total), 0.0)
    return n, logs, first, kept, left, whole


@triton.jit
def pairs_of(logs, first, n, earlier_logs, earlier):
    """P with rows n and columns `earlier`, including the diagonal."""
    seen = (earlier[None, :] <= n[:, None]) & (earlier[None, :] >= first[:, None])
    return tl.where(seen, exp(tl.minimum(logs[:, None] - earlier_logs[None, :], 0.0)), 0.0)


@triton.jit
def product(a, b, EXACT: tl.constexpr):
    """The matrix product a b of float32 tiles, in TF32 unless EXACT."""
    return tl.dot(a, b, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def inverse_of(coupling, EXACT: tl.constexpr):
    """(I + T)^-1 of a strictly lower triangular T, by block doubling; as stable as forward substitution."""
    i, j = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
    below = ((i >> 1) == (j >> 1)) & (i > j)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(below, coupling, 0.0)
    tl.static_assert(HALF == 32)
    for level in tl.static_range(1, 5):
        # Two blocks of 2^level rows become one: [[a, 0], [t, b]]^-1 has -b^-1 t a^-1 below.
        below = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
        part = product(inverse, tl.where(below, coupling, 0.0), EXACT)
        inverse -= product(part, inverse, EXACT)
    return inverse


@triton.jit(do_not_specialize=["length", "start"])
def solve(tokens, solved, length, start, heads, SHAPE: tl.constexpr):
    """X of every chunk, (B, H_kv, N, C) in the dtype of keys. Program: one chunk of a key head."""
    D: tl.constexpr = SHAPE.width
    DP: tl.constexpr = SHAPE.padded_width
    entry, at = chunk_of(length)
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    m = at + tl.arange(0, HALF)
    n = m + HALF
    more = load_per_token(tokens.log_decay, entry, at, length, HALF)
    logs_m = tl.cumsum(more, 0)
    logs_n = tl.sum(more, 0) + tl.cumsum(load_per_token(tokens.log_decay, entry, at + HALF, length, HALF), 0)
    first_m = document_start(tokens.starts, batch, m, length, start)
    first_n = document_start(tokens.starts, batch, n, length, start)
    b_m = load_per_token(tokens.strength, entry, at, length, HALF)[:, None]
    b_n = load_per_token(tokens.strength, entry, at + HALF, length, HALF)[:, None]
    k = row_ptr(tokens.k, batch, head, at)
    keys_m = load_rows(k, tokens.k.row, length - at, HALF, D, DP)
    keys_n = load_rows(k + HALF * tokens.k.row, tokens.k.row, length - at - HALF, HALF, D, DP)
    corner = b_n * pairs_of(logs_n, first_n, n, logs_m, m) * dot(keys_n, tl.trans(keys_m), dtype)
    strict = m[:, None] > m[None, :]
    t_m = b_m * pairs_of(logs_m, first_m, m, logs_m, m) * dot(keys_m, tl.trans(keys_m), dtype)
    inverse_m = inverse_of(tl.where(strict, t_m, 0.0), EXACT)
    t_n = b_n * pairs_of(logs_n, first_n, n, logs_n, n) * dot(keys_n, tl.trans(keys_n), dtype)
    inverse_n = inverse_of(tl.where(strict, t_n, 0.0), EXACT)
    corner = product(inverse_n, product(corner, inverse_m, EXACT), EXACT)
    x = solved + (entry.to(tl.int64) * length + at) * SIZE
    store_rows(x, SIZE, length - at, inverse_m, HALF, HALF)
    store_rows(x + HALF, SIZE, length - at, tl.zeros_like(inverse_m), HALF, HALF)
    x += HALF * SIZE
    store_rows(x, SIZE, length - at - HALF, -corner, HALF, HALF)
    store_rows(x + HALF, SIZE, length - at - HALF, inverse_n, HALF, HALF)


@triton.jit
def state_offsets(entry, column, SHAPE: tl.constexpr):
    """Offsets of the columns of a state (d, D) from `column` on, and their mask."""
    d = tl.arange(0, SHAPE.padded_width)[:, None]
    c = column + tl.arange(0, SHAPE.columns)[None, :]
    mask = (d < SHAPE.width) & (c < SHAPE.values)
    return entry.to(tl.int64) * (SHAPE.width * SHAPE.values) + d * SHAPE.values + c, mask


@triton.jit(do_not_specialize=["length", "start"])
def pass_on(tokens, solved, first, states, written, last, length, start, heads, SHAPE: tl.constexpr):
    """U (B, H_kv, N, D), the states that enter chunks (B, H_kv, chunks, d, D), and the last state.

    first, last: (B, H_kv, d, D) float32. Program: (key head, block of columns).
    """
    entry, column = tl.program_id(0), tl.program_id(1) * SHAPE.columns
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    chunks = tl.cdiv(length, SIZE)
    edge_offsets, mask = state_offsets(entry, column, SHAPE)
    b_state = tl.load(first + edge_offsets, mask=mask, other=0.0)
    for chunk in range(chunks):
        at = chunk * SIZE
        _n, _logs, _first, kept, left, whole = decays_of(tokens, entry, batch, at, length, start)
        num_valid, row_idx = length - at, entry.to(tl.int64) * length + at
        offsets, mask = state_offsets(entry * chunks + chunk, column, SHAPE)
        tl.store(states + offsets, rounded(b_state, states.dtype.element_ty), mask=mask)
        b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
        b_v = load_v(tokens.v, batch, head, at, length, column, SHAPE).to(tl.float32)
        strength = load_per_token(tokens.strength, entry, at, length, SIZE)
        b_residual = strength[:, None] * (b_v - kept[:, None] * dot(b_k, b_state, dtype))
        b_x = load_rows(solved + row_idx * SIZE, SIZE, num_valid, SIZE, SIZE, SIZE)
        b_u = dot(b_x, b_residual, dtype)
        store_columns(written, row_idx, num_valid, column, b_u, SHAPE)
        b_state = whole * b_state + dot(tl.trans(b_k.to(tl.float32) * left[:, None]), b_u, dtype)
    tl.store(last + edge_offsets, b_state, mask=mask)


@triton.jit(do_not_specialize=["length", "start"])
def read(tokens, states, written, out, length, start, heads, SHAPE: tl.constexpr):
    """O, (B, H, N, D). Program: (chunk of a query head, block of columns)."""
    q_head, at = chunk_of(length)
    entry, column = q_head // SHAPE.group, tl.program_id(1) * SHAPE.columns
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, kept, _left, _whole = decays_of(tokens, entry, batch, at, length, start)
    num_valid = length - at
    b_q = load_qk(tokens.q, batch, q_head % (heads * SHAPE.group), at, length, SHAPE)
    b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
    chunk = entry * tl.cdiv(length, SIZE) + at // SIZE
    b_o = dot(b_q, load_state_columns(states, chunk, column, SHAPE), dtype) * kept[:, None]
    b_s = dot(b_q, tl.trans(b_k), dtype) * pairs_of(logs, first, n, logs, n)
    row_idx = entry.to(tl.int64) * length + at
    b_o += dot(b_s, load_columns(written, row_idx, num_valid, column, SHAPE), dtype)
    row = q_head.to(tl.int64) * length + at
    store_columns(out, row, num_valid, column, b_o * SHAPE.scale, SHAPE)


@triton.jit(do_not_specialize=["length", "start"])
def bwd_read(tokens, do, dwritten, length, start, heads, SHAPE: tl.constexpr):
    """The part of dU from the chunk's own queries, (B, H_kv, N, D).

    Program: (chunk of a key head, block of columns).
    """
    V: tl.constexpr = SHAPE.columns
    entry, at = chunk_of(length)
    column = tl.program_id(1) * V
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, _kept, _left, _whole = decays_of(tokens, entry, batch, at, length, start)
    num_valid = length - at
    b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
    pairs = pairs_of(logs, first, n, logs, n) * SHAPE.scale
    b_du = tl.zeros((SIZE, V), tl.float32)
    for g in range(SHAPE.group):
        q_head = head * SHAPE.group + g
        b_q = load_qk(tokens.q, batch, q_head, at, length, SHAPE)
        b_s = dot(b_q, tl.trans(b_k), dtype) * pairs
        b_do = load_v(do, batch, q_head, at, length, column, SHAPE)
        b_du += dot(tl.trans(b_s), b_do, dtype)
    store_columns(dwritten, entry.to(tl.int64) * length + at, num_valid, column, b_du, SHAPE)


@triton.jit(do_not_specialize=["length", "start"])
def bwd_pass_on(
    tokens, do, solved, dwritten, dlast, dstates, r, dfirst, length, start, heads, SHAPE: tl.constexpr
):
    """R (B, H_kv, N, D), gradients of the chunks' outgoing states (B, H_kv, chunks, d, D), and of the first state.

    dlast, dfirst: (B, H_kv, d, D) float32. Program: (key head, block of columns).
    """
    entry, column = tl.program_id(0), tl.program_id(1) * SHAPE.columns
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    chunks = tl.cdiv(length, SIZE)
    offsets, mask = state_offsets(entry, column, SHAPE)
    b_state = tl.load(dlast + offsets, mask=mask, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step
        at = chunk * SIZE
        _n, _logs, _first, kept, left, whole = decays_of(tokens, entry, batch, at, length, start)
        num_valid, row_idx = length - at, entry.to(tl.int64) * length + at
        chunk_offsets, mask = state_offsets(entry * chunks + chunk, column, SHAPE)
        tl.store(dstates + chunk_offsets, rounded(b_state, dstates.dtype.element_ty), mask=mask)
        b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
        b_du = load_columns(dwritten, row_idx, num_valid, column, SHAPE).to(tl.float32)
        b_du += left[:, None] * dot(b_k, b_state, dtype)
        x = load_rows(solved + row_idx * SIZE, SIZE, num_valid, SIZE, SIZE, SIZE)
        b_r = dot(tl.trans(x), b_du, dtype)
        store_columns(r, row_idx, num_valid, column, b_r, SHAPE)
        b_held = load_per_token(tokens.strength, entry, at, length, SIZE) * kept
        b_state = whole * b_state - dot(tl.trans(b_k.to(tl.float32) * b_held[:, None]), b_r, dtype)
        # If it pipelined this loop, Triton 3.7 would compute an operand again while a product still reads it
        # (triton-lang/triton, issue 9433).
        for g in tl.range(SHAPE.group, num_stages=1):
            q_head = head * SHAPE.group + g
            b_q = load_qk(tokens.q, batch, q_head, at, length, SHAPE)
            b_do = load_v(do, batch, q_head, at, length, column, SHAPE)
            b_q_scaled = b_q.to(tl.float32) * (kept * SHAPE.scale)[:, None]
            b_state += dot(tl.trans(b_q_scaled), b_do, dtype)
    tl.store(dfirst + offsets, b_state, mask=mask)


@triton.jit
def sum_of(x):
    """The sum of (C,), as (1,)."""
    # As a column, see `states.largest_of`.
    return tl.sum(x[:, None], 0)


@triton.jit
def ds_of_head(do, written, batch, q_head, row_idx, at, length, SHAPE: tl.constexpr):
    """dO U^T of a query head's chunk, (C, C)."""
    V: tl.constexpr = SHAPE.columns
    dtype: tl.constexpr = written.dtype.element_ty
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for column in range(0, SHAPE.values, V):
        b_do = load_v(do, batch, q_head, at, length, column, SHAPE)
        total += dot(b_do, tl.trans(load_columns(written, row_idx, length - at, column, SHAPE)), dtype)
    return total


@triton.jit(do_not_specialize=["length", "start"])
def bwd_queries(tokens, do, states, written, dq, dlog, length, start, heads, SHAPE: tl.constexpr):
    """Gradients of queries, and of log A through what they read of states, (B, H, N).

    Program: one chunk of a query head.
    """
    D: tl.constexpr = SHAPE.width
    DP: tl.constexpr = SHAPE.padded_width
    V: tl.constexpr = SHAPE.columns
    q_head, at = chunk_of(length)
    entry = q_head // SHAPE.group
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, kept, _left, _whole = decays_of(tokens, entry, batch, at, length, start)
    num_valid, row_idx = length - at, entry.to(tl.int64) * length + at
    chunk = entry * tl.cdiv(length, SIZE) + at // SIZE
    q_head_of_batch = q_head % (heads * SHAPE.group)
    dq_of_state = tl.zeros((SIZE, DP), tl.float32)
    for column in range(0, SHAPE.values, V):
        b_do = load_v(do, batch, q_head_of_batch, at, length, column, SHAPE)
        dq_of_state += dot(b_do, tl.trans(load_state_columns(states, chunk, column, SHAPE)), dtype)
    dq_of_state *= (kept * SHAPE.scale)[:, None]
    row = q_head.to(tl.int64) * length + at
    b_q = load_qk(tokens.q, batch, q_head_of_batch, at, length, SHAPE).to(tl.float32)
    tl.store(dlog + row + tl.arange(0, SIZE), tl.sum(b_q * dq_of_state, 1), mask=n < length)
    b_ds = ds_of_head(do, written, batch, q_head_of_batch, row_idx, at, length, SHAPE)
    b_ds *= pairs_of(logs, first, n, logs, n) * SHAPE.scale
    b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
    store_rows(dq + row * D, D, num_valid, dq_of_state + dot(b_ds, b_k, dtype), D, DP)


@triton.jit(do_not_specialize=["length", "start"])
def bwd_keys(
    tokens,
    do,
    states,
    written,
    dstates,
    r,
    dlog_of_queries,
    dk,
    dv,
    dlog_decay,
    dstrength,
    length,
    start,
    heads,
    SHAPE: tl.constexpr,
):
    """Gradients of keys, values, decays and strengths. Program: one chunk of a key head.

    The gradient of a decay is a sum over all that passes its token, from earlier columns to later rows. A product adds
    the same number to its row and subtracts it from its column, so these cancel exactly.
    """
    D: tl.constexpr = SHAPE.width
    DP: tl.constexpr = SHAPE.padded_width
    V: tl.constexpr = SHAPE.columns
    entry, at = chunk_of(length)
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, kept, left, whole = decays_of(tokens, entry, batch, at, length, start)
    num_valid, row_idx = length - at, entry.to(tl.int64) * length + at
    chunk = entry * tl.cdiv(length, SIZE) + at // SIZE
    strength = load_per_token(tokens.strength, entry, at, length, SIZE)
    # One product of the keys' width per loop: two at once would not fit into registers.
    dk_of_later = tl.zeros((SIZE, DP), tl.float32)
    state_dot_dstate = tl.zeros((DP,), tl.float32)
    for column in range(0, SHAPE.values, V):
        b_u = load_columns(written, row_idx, num_valid, column, SHAPE)
        b_state = load_state_columns(states, chunk, column, SHAPE).to(tl.float32)
        b_dstate = load_state_columns(dstates, chunk, column, SHAPE)
        state_dot_dstate += tl.sum(b_state * b_dstate.to(tl.float32), 1)
        dk_of_later += dot(b_u, tl.trans(b_dstate), dtype)
    b_dk = dk_of_later * left[:, None]
    b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
    dlog = -tl.sum(b_k.to(tl.float32) * b_dk, 1)
    dlog_later = whole * sum_of(state_dot_dstate) - sum_of(dlog)

    b_dpairs = tl.zeros((SIZE, SIZE), tl.float32)
    dk_of_state = tl.zeros((SIZE, DP), tl.float32)
    for column in range(0, SHAPE.values, V):
        b_u = load_columns(written, row_idx, num_valid, column, SHAPE)
        b_r = load_columns(r, row_idx, num_valid, column, SHAPE)
        b_dpairs += dot(b_r, tl.trans(b_u), dtype)
        dk_of_state += dot(b_r, tl.trans(load_state_columns(states, chunk, column, SHAPE)), dtype)
        store_columns(dv, row_idx, num_valid, column, b_r.to(tl.float32) * strength[:, None], SHAPE)
    diagonal = tl.sum(tl.where(n[:, None] == n[None, :], b_dpairs, 0.0), 1)
    tl.store(dstrength + row_idx + tl.arange(0, SIZE), diagonal / strength, mask=n < length)
    dk_of_state *= -(strength * kept)[:, None]
    b_k = load_qk(tokens.k, batch, head, at, length, SHAPE)
    dlog += tl.sum(b_k.to(tl.float32) * dk_of_state, 1)
    b_dk += dk_of_state
    pairs = pairs_of(logs, first, n, logs, n)
    b_dpairs = tl.where(n[:, None] > n[None, :], -b_dpairs * pairs * strength[:, None], 0.0)
    b_dk += dot(b_dpairs, b_k, dtype)
    b_dk += dot(tl.trans(b_dpairs), b_k, dtype)
    b_dpairs *= dot(b_k, tl.trans(b_k), dtype)
    dlog += tl.sum(b_dpairs, 1) - tl.sum(b_dpairs, 0)
    for g in range(SHAPE.group):
        q_head = head * SHAPE.group + g
        b_ds = ds_of_head(do, written, batch, q_head, row_idx, at, length, SHAPE)
        b_ds *= pairs * SHAPE.scale
        b_q = load_qk(tokens.q, batch, q_head, at, length, SHAPE)
        b_dk += dot(tl.trans(b_ds), b_q, dtype)
        b_ds *= dot(b_q, tl.trans(b_k), dtype)
        dlog += tl.sum(b_ds, 1) - tl.sum(b_ds, 0)
        dlog += load_per_token(dlog_of_queries, entry * SHAPE.group + g, at, length, SIZE)
    store_rows(dk + row_idx * D, D, num_valid, b_dk, D, DP)
    later = tl.sum(tl.where(n[:, None] >= n[None, :], dlog[:, None], 0.0), 0) + dlog_later
    tl.store(dlog_decay + row_idx + tl.arange(0, SIZE), later, mask=n < length)
