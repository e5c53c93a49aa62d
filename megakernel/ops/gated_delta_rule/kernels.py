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

from megakernel.ops.kernel_attention.arguments import head_at, load_numbers
from megakernel.ops.kernels.features import dot, exp, load_rows, rounded, store_rows
from megakernel.ops.kernels.launch import Rows
from megakernel.ops.kernels.states import first_token

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


class Tokens(NamedTuple):
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
def rows_at(rows, batch, head, at):
    """Pointer to the row of token `at` of a head."""
    return head_at(rows, batch, head) + tl.cast(at, tl.int64) * rows.row


@triton.jit
def tokens_at(rows, batch, head, at, length, SHAPE: tl.constexpr):
    """C queries or keys of a head from token `at` on, (C, DP)."""
    start = rows_at(rows, batch, head, at)
    return load_rows(start, rows.row, length - at, SIZE, SHAPE.width, SHAPE.padded_width)


@triton.jit
def values_at(rows, batch, head, at, length, column, SHAPE: tl.constexpr):
    """Columns (C, V) of the values, or of gradients of outputs, of a head from token `at` on."""
    start = rows_at(rows, batch, head, at) + column
    return load_rows(start, rows.row, length - at, SIZE, SHAPE.values - column, SHAPE.columns)


@triton.jit
def columns_at(x, place, count, column, SHAPE: tl.constexpr):
    """Columns (C, V) of C rows of D elements of `x`, from row `place` on."""
    start = x + place * SHAPE.values + column
    return load_rows(start, SHAPE.values, count, SIZE, SHAPE.values - column, SHAPE.columns)


@triton.jit
def store_columns(x, place, count, column, numbers, SHAPE: tl.constexpr):
    """The inverse of `columns_at`."""
    start = x + place * SHAPE.values + column
    store_rows(start, SHAPE.values, count, numbers, SHAPE.values - column, SHAPE.columns)


@triton.jit
def state_columns(states, entry, column, SHAPE: tl.constexpr):
    """Columns (DP, V) of a state in memory."""
    places, there = state_at(entry, column, SHAPE)
    return tl.load(states + places, mask=there, other=0.0)


@triton.jit
def numbers_at(numbers, entry, at, length, C: tl.constexpr):
    """The elements of `numbers` for C tokens of a key head from `at` on."""
    return load_numbers(numbers + entry.to(tl.int64) * length, at, length, C)


@triton.jit
def decays_of(tokens, entry, batch, at, length, start):
    """For the C tokens from `at` on: their places, log A, where their documents start, A, L, and A_C.

    A is 0 for tokens that do not see the entering state, L for tokens that are not in the outgoing state.
    """
    n = at + tl.arange(0, SIZE)
    each = numbers_at(tokens.log_decay, entry, at, length, SIZE)
    logs = tl.cumsum(each, 0)
    # The last element of `logs` rather than a separate sum, so that L of the last token is exactly 1.
    total = tl.sum(tl.where(n == at + SIZE - 1, logs, 0.0), 0)
    first = first_token(tokens.starts, batch, n, length, start)
    newest = first_token(tokens.starts, batch, tl.minimum(at + SIZE, length) - 1, length, start)
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
    more = numbers_at(tokens.log_decay, entry, at, length, HALF)
    logs_m = tl.cumsum(more, 0)
    logs_n = tl.sum(more, 0) + tl.cumsum(numbers_at(tokens.log_decay, entry, at + HALF, length, HALF), 0)
    first_m = first_token(tokens.starts, batch, m, length, start)
    first_n = first_token(tokens.starts, batch, n, length, start)
    b_m = numbers_at(tokens.strength, entry, at, length, HALF)[:, None]
    b_n = numbers_at(tokens.strength, entry, at + HALF, length, HALF)[:, None]
    k = rows_at(tokens.k, batch, head, at)
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
def state_at(entry, column, SHAPE: tl.constexpr):
    """Offsets of the columns of a state (d, D) from `column` on, and their mask."""
    d = tl.arange(0, SHAPE.padded_width)[:, None]
    c = column + tl.arange(0, SHAPE.columns)[None, :]
    there = (d < SHAPE.width) & (c < SHAPE.values)
    return entry.to(tl.int64) * (SHAPE.width * SHAPE.values) + d * SHAPE.values + c, there


@triton.jit(do_not_specialize=["length", "start"])
def pass_on(tokens, solved, first, states, written, last, length, start, heads, SHAPE: tl.constexpr):
    """U (B, H_kv, N, D), the states that enter chunks (B, H_kv, chunks, d, D), and the last state.

    first, last: (B, H_kv, d, D) float32. Program: (key head, block of columns).
    """
    entry, column = tl.program_id(0), tl.program_id(1) * SHAPE.columns
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    chunks = tl.cdiv(length, SIZE)
    places, there = state_at(entry, column, SHAPE)
    state = tl.load(first + places, mask=there, other=0.0)
    for chunk in range(chunks):
        at = chunk * SIZE
        _n, _logs, _first, kept, left, whole = decays_of(tokens, entry, batch, at, length, start)
        count, place = length - at, entry.to(tl.int64) * length + at
        here, there = state_at(entry * chunks + chunk, column, SHAPE)
        tl.store(states + here, rounded(state, states.dtype.element_ty), mask=there)
        keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
        values = values_at(tokens.v, batch, head, at, length, column, SHAPE).to(tl.float32)
        strength = numbers_at(tokens.strength, entry, at, length, SIZE)
        given = strength[:, None] * (values - kept[:, None] * dot(keys, state, dtype))
        x = load_rows(solved + place * SIZE, SIZE, count, SIZE, SIZE, SIZE)
        u = dot(x, given, dtype)
        store_columns(written, place, count, column, u, SHAPE)
        state = whole * state + dot(tl.trans(keys.to(tl.float32) * left[:, None]), u, dtype)
    tl.store(last + places, state, mask=there)


@triton.jit(do_not_specialize=["length", "start"])
def read(tokens, states, written, out, length, start, heads, SHAPE: tl.constexpr):
    """O, (B, H, N, D). Program: (chunk of a query head, block of columns)."""
    reader, at = chunk_of(length)
    entry, column = reader // SHAPE.group, tl.program_id(1) * SHAPE.columns
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, kept, _left, _whole = decays_of(tokens, entry, batch, at, length, start)
    count = length - at
    queries = tokens_at(tokens.q, batch, reader % (heads * SHAPE.group), at, length, SHAPE)
    keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
    chunk = entry * tl.cdiv(length, SIZE) + at // SIZE
    seen = dot(queries, state_columns(states, chunk, column, SHAPE), dtype) * kept[:, None]
    scores = dot(queries, tl.trans(keys), dtype) * pairs_of(logs, first, n, logs, n)
    place = entry.to(tl.int64) * length + at
    seen += dot(scores, columns_at(written, place, count, column, SHAPE), dtype)
    row = reader.to(tl.int64) * length + at
    store_columns(out, row, count, column, seen * SHAPE.scale, SHAPE)


@triton.jit(do_not_specialize=["length", "start"])
def bwd_read(tokens, grad, dwritten, length, start, heads, SHAPE: tl.constexpr):
    """The part of dU from the chunk's own queries, (B, H_kv, N, D).

    Program: (chunk of a key head, block of columns).
    """
    V: tl.constexpr = SHAPE.columns
    entry, at = chunk_of(length)
    column = tl.program_id(1) * V
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, _kept, _left, _whole = decays_of(tokens, entry, batch, at, length, start)
    count = length - at
    keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
    pairs = pairs_of(logs, first, n, logs, n) * SHAPE.scale
    total = tl.zeros((SIZE, V), tl.float32)
    for one in range(SHAPE.group):
        reader = head * SHAPE.group + one
        queries = tokens_at(tokens.q, batch, reader, at, length, SHAPE)
        scores = dot(queries, tl.trans(keys), dtype) * pairs
        do = values_at(grad, batch, reader, at, length, column, SHAPE)
        total += dot(tl.trans(scores), do, dtype)
    store_columns(dwritten, entry.to(tl.int64) * length + at, count, column, total, SHAPE)


@triton.jit(do_not_specialize=["length", "start"])
def bwd_pass_on(
    tokens, grad, solved, dwritten, dlast, dstates, r, dfirst, length, start, heads, SHAPE: tl.constexpr
):
    """R (B, H_kv, N, D), gradients of the chunks' outgoing states (B, H_kv, chunks, d, D), and of the first state.

    dlast, dfirst: (B, H_kv, d, D) float32. Program: (key head, block of columns).
    """
    entry, column = tl.program_id(0), tl.program_id(1) * SHAPE.columns
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    chunks = tl.cdiv(length, SIZE)
    places, there = state_at(entry, column, SHAPE)
    state = tl.load(dlast + places, mask=there, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step
        at = chunk * SIZE
        _n, _logs, _first, kept, left, whole = decays_of(tokens, entry, batch, at, length, start)
        count, place = length - at, entry.to(tl.int64) * length + at
        here, there = state_at(entry * chunks + chunk, column, SHAPE)
        tl.store(dstates + here, rounded(state, dstates.dtype.element_ty), mask=there)
        keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
        du = columns_at(dwritten, place, count, column, SHAPE).to(tl.float32)
        du += left[:, None] * dot(keys, state, dtype)
        x = load_rows(solved + place * SIZE, SIZE, count, SIZE, SIZE, SIZE)
        asked = dot(tl.trans(x), du, dtype)
        store_columns(r, place, count, column, asked, SHAPE)
        held = numbers_at(tokens.strength, entry, at, length, SIZE) * kept
        state = whole * state - dot(tl.trans(keys.to(tl.float32) * held[:, None]), asked, dtype)
        # If it pipelined this loop, Triton 3.7 would compute an operand again while a product still reads it
        # (triton-lang/triton, issue 9433).
        for one in tl.range(SHAPE.group, num_stages=1):
            reader = head * SHAPE.group + one
            queries = tokens_at(tokens.q, batch, reader, at, length, SHAPE)
            do = values_at(grad, batch, reader, at, length, column, SHAPE)
            seen = queries.to(tl.float32) * (kept * SHAPE.scale)[:, None]
            state += dot(tl.trans(seen), do, dtype)
    tl.store(dfirst + places, state, mask=there)


@triton.jit
def sum_of(numbers):
    """The sum of (C,), as (1,)."""
    # As a column, see `states.largest_of`.
    return tl.sum(numbers[:, None], 0)


@triton.jit
def gradient_of_scores(grad, written, batch, reader, place, at, length, SHAPE: tl.constexpr):
    """dO U^T of a query head's chunk, (C, C)."""
    V: tl.constexpr = SHAPE.columns
    dtype: tl.constexpr = written.dtype.element_ty
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for column in range(0, SHAPE.values, V):
        given = values_at(grad, batch, reader, at, length, column, SHAPE)
        total += dot(given, tl.trans(columns_at(written, place, length - at, column, SHAPE)), dtype)
    return total


@triton.jit(do_not_specialize=["length", "start"])
def bwd_queries(tokens, grad, states, written, dq, passing, length, start, heads, SHAPE: tl.constexpr):
    """Gradients of queries, and of log A through what they read of states, (B, H, N).

    Program: one chunk of a query head.
    """
    D: tl.constexpr = SHAPE.width
    DP: tl.constexpr = SHAPE.padded_width
    V: tl.constexpr = SHAPE.columns
    reader, at = chunk_of(length)
    entry = reader // SHAPE.group
    batch, head = entry // heads, entry % heads
    dtype: tl.constexpr = tokens.k.pointer.dtype.element_ty
    n, logs, first, kept, _left, _whole = decays_of(tokens, entry, batch, at, length, start)
    count, place = length - at, entry.to(tl.int64) * length + at
    chunk = entry * tl.cdiv(length, SIZE) + at // SIZE
    reader_of_batch = reader % (heads * SHAPE.group)
    of_state = tl.zeros((SIZE, DP), tl.float32)
    for column in range(0, SHAPE.values, V):
        given = values_at(grad, batch, reader_of_batch, at, length, column, SHAPE)
        of_state += dot(given, tl.trans(state_columns(states, chunk, column, SHAPE)), dtype)
    of_state *= (kept * SHAPE.scale)[:, None]
    row = reader.to(tl.int64) * length + at
    queries = tokens_at(tokens.q, batch, reader_of_batch, at, length, SHAPE).to(tl.float32)
    tl.store(passing + row + tl.arange(0, SIZE), tl.sum(queries * of_state, 1), mask=n < length)
    of_scores = gradient_of_scores(grad, written, batch, reader_of_batch, place, at, length, SHAPE)
    of_scores *= pairs_of(logs, first, n, logs, n) * SHAPE.scale
    keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
    store_rows(dq + row * D, D, count, of_state + dot(of_scores, keys, dtype), D, DP)


@triton.jit(do_not_specialize=["length", "start"])
def bwd_keys(
    tokens,
    grad,
    states,
    written,
    dstates,
    r,
    passing_queries,
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
    count, place = length - at, entry.to(tl.int64) * length + at
    chunk = entry * tl.cdiv(length, SIZE) + at // SIZE
    strength = numbers_at(tokens.strength, entry, at, length, SIZE)
    # One product of the keys' width per loop: two at once would not fit into registers.
    of_leaving = tl.zeros((SIZE, DP), tl.float32)
    along = tl.zeros((DP,), tl.float32)
    for column in range(0, SHAPE.values, V):
        u = columns_at(written, place, count, column, SHAPE)
        state = state_columns(states, chunk, column, SHAPE).to(tl.float32)
        dstate = state_columns(dstates, chunk, column, SHAPE)
        along += tl.sum(state * dstate.to(tl.float32), 1)
        of_leaving += dot(u, tl.trans(dstate), dtype)
    dkeys = of_leaving * left[:, None]
    keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
    passing = -tl.sum(keys.to(tl.float32) * dkeys, 1)
    behind = whole * sum_of(along) - sum_of(passing)

    of_pairs = tl.zeros((SIZE, SIZE), tl.float32)
    of_state = tl.zeros((SIZE, DP), tl.float32)
    for column in range(0, SHAPE.values, V):
        u = columns_at(written, place, count, column, SHAPE)
        asked = columns_at(r, place, count, column, SHAPE)
        of_pairs += dot(asked, tl.trans(u), dtype)
        of_state += dot(asked, tl.trans(state_columns(states, chunk, column, SHAPE)), dtype)
        store_columns(dv, place, count, column, asked.to(tl.float32) * strength[:, None], SHAPE)
    own = tl.sum(tl.where(n[:, None] == n[None, :], of_pairs, 0.0), 1)
    tl.store(dstrength + place + tl.arange(0, SIZE), own / strength, mask=n < length)
    of_state *= -(strength * kept)[:, None]
    keys = tokens_at(tokens.k, batch, head, at, length, SHAPE)
    passing += tl.sum(keys.to(tl.float32) * of_state, 1)
    dkeys += of_state
    pairs = pairs_of(logs, first, n, logs, n)
    of_pairs = tl.where(n[:, None] > n[None, :], -of_pairs * pairs * strength[:, None], 0.0)
    dkeys += dot(of_pairs, keys, dtype)
    dkeys += dot(tl.trans(of_pairs), keys, dtype)
    of_pairs *= dot(keys, tl.trans(keys), dtype)
    passing += tl.sum(of_pairs, 1) - tl.sum(of_pairs, 0)
    for one in range(SHAPE.group):
        reader = head * SHAPE.group + one
        of_scores = gradient_of_scores(grad, written, batch, reader, place, at, length, SHAPE)
        of_scores *= pairs * SHAPE.scale
        queries = tokens_at(tokens.q, batch, reader, at, length, SHAPE)
        dkeys += dot(tl.trans(of_scores), queries, dtype)
        of_scores *= dot(queries, tl.trans(keys), dtype)
        passing += tl.sum(of_scores, 1) - tl.sum(of_scores, 0)
        passing += numbers_at(passing_queries, entry * SHAPE.group + one, at, length, SIZE)
    store_rows(dk + place * D, D, count, dkeys, D, DP)
    later = tl.sum(tl.where(n[:, None] >= n[None, :], passing[:, None], 0.0), 0) + behind
    tl.store(dlog_decay + place + tl.arange(0, SIZE), later, mask=n < length)
