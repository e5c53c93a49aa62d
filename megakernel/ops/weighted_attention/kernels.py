"""Triton kernels of weighted attention: outputs, and gradients of queries, keys, values and key weights.

Only one tile of weights, of a block of queries and a block of positions, exists at a time. Key r of position j weighs

    w_ijr = exp2(c_r q_i.k_jr + a_ir + b_jr)

with c_r the precision, b_jr the log of the key's weight, a_ir the negative log of query i's normalizer. For a gaussian,
a and b also include the squares of -|q - k|^2 / 2, which are summed in float32 and never rounded. All are in units of
log 2, because GPUs compute exp2. With the output gradient dO_i and delta_i = dO_i.o_i (0 without normalization):

    s_ijr = w_ijr (dO_i.v_j - delta_i)    dv_j = sum_ir w_ijr dO_i    dlog m_jr = sum_i s_ijr
    dq_i = sum_jr p_r s_ijr (k_jr - q_i)    dk_jr = p_r sum_i s_ijr (q_i - k_jr)    (softmax: without the second term)

Both terms of a difference are multiplied by the same s, rounded for the tensor cores: an offset that queries and keys
share then cancels instead of amplifying the rounding error.

Each row of a tile sees an interval of columns, since documents are contiguous: keys first .. last of a query, or in
`bwd_dkv` queries first .. last of a key.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megakernel.ops.kernels.arguments import head_ptr, load_vector
from megakernel.ops.kernels.launch import Rows
from megakernel.ops.kernels.primitives import EMPTY, dot, load_rows, padded, rounded, store_rows


class Visible(NamedTuple):
    """The first and the last column that each row of tiles sees, (B, rows) int32."""

    first: Any
    last: Any
    batch: int
    """Batch stride; 0 if all sequences have the same intervals."""

    @staticmethod
    def of(first: Tensor, last: Tensor) -> "Visible":
        """From intervals (B, rows), or (1, rows) if they are the same for all sequences."""
        return Visible(first, last, first.stride(0) if len(first) > 1 else 0)


class Pairs(NamedTuple):
    """Arguments of all kernels: queries, keys, values, and terms and visibility of the weights."""

    q: Rows
    k: Rows
    """(B, H_kv M, S, d): the keys of a position are consecutive heads."""

    v: Rows
    of_queries: Any
    """a of the module docstring, (B, H, M, N) float32."""

    of_keys: Any
    """b of the module docstring, (B, H_kv, M, S) float32."""

    visible: Visible
    length: int
    """N."""

    kv_length: int
    """S."""

    kv_heads: int


class Weighting(NamedTuple):
    """Compile-time constants of a launch."""

    precisions: tuple[float, ...]
    """c of each key of a position, in units of log 2."""

    gaussian: bool
    hard: bool
    """Whether a position's weight is that of its largest key, not the sum."""

    group: int
    """Query heads per key head."""

    width: int
    """d."""

    value_dim: int
    """D."""

    block_q: int
    """Queries of a tile."""

    block_kv: int
    """Positions of a tile."""

    @property
    def components(self) -> int:
        """M."""
        return len(self.precisions)

    @property
    def factors(self) -> tuple[float, ...]:
        """p of the module docstring."""
        return tuple(c * math.log(2) for c in self.precisions)

    @property
    def padded_width(self) -> int:
        """d padded to the power of two of a tile."""
        return padded(self.width)

    @property
    def padded_value_dim(self) -> int:
        """D padded to the power of two of a tile."""
        return padded(self.value_dim)


class Block(NamedTuple):
    """The rows of tiles that a program processes."""

    batch: Any
    head: Any
    """Head within the sequence; `entry`: among the heads of all sequences."""

    entry: Any
    start: Any
    """The first row."""

    rows: Any
    begin: Any
    """The first column that each row sees; `end`: the last one. Rows beyond the sequence see none."""

    end: Any


@triton.jit
def block_of_program(visible, heads, count, LAST_FIRST: tl.constexpr, C: tl.constexpr):
    """The program's block of C of `count` rows; with LAST_FIRST the programs of the last blocks start first."""
    blocks = tl.cdiv(count, C)
    entry, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    start = (blocks - 1 - block if LAST_FIRST else block) * C
    rows = start + tl.arange(0, C)
    batch, inside = entry // heads, rows < count
    begin = tl.load(visible.first + batch * visible.batch + rows, mask=inside, other=2147483647)
    end = tl.load(visible.last + batch * visible.batch + rows, mask=inside, other=-1)
    return Block(batch, entry % heads, entry, start, rows, begin, end)


@triton.jit
def load_tokens(tokens, batch, head, at, length, C: tl.constexpr, D, DP: tl.constexpr):
    """A tile (C, DP) of the tokens of a head from index `at` on."""
    start = head_ptr(tokens, batch, head) + tl.cast(at, tl.int64) * tokens.row
    return load_rows(start, tokens.row, length - at, C, D, DP)


@triton.jit
def load_terms(terms, entry, at, length, C: tl.constexpr, META: tl.constexpr):
    """a or b of the module docstring, (..., M, length), from index `at` on: M times (C,).

    Values from `length` on are arbitrary: no query sees keys there, and queries there have no gradient.
    """
    M: tl.constexpr = META.components
    terms += entry * M * length
    found = ()
    for _ in tl.static_range(M):
        found = found + (load_vector(terms, at, length, C),)
        terms += length
    return found


@triton.jit
def load_positions(pairs, batch, kv, at, META: tl.constexpr):
    """The M keys of the positions from `at` on, tiles (BK, DP), their values (BK, VP), and b (module docstring)."""
    M: tl.constexpr = META.components
    BK: tl.constexpr = META.block_kv
    length = pairs.kv_length
    b_k = ()
    for r in tl.static_range(M):
        b_key = load_tokens(pairs.k, batch, kv * M + r, at, length, BK, META.width, META.padded_width)
        b_k = b_k + (b_key,)
    b_v = load_tokens(pairs.v, batch, kv, at, length, BK, META.value_dim, META.padded_value_dim)
    return b_k, b_v, load_terms(pairs.of_keys, batch * pairs.kv_heads + kv, at, length, BK, META)


@triton.jit
def store_tokens(start, entry, at, length, x, D, DP: tl.constexpr):
    """Store a tile as rows of a contiguous (..., length, D) tensor from index `at` on."""
    store_rows(start + (entry * length + at) * D, D, length - at, x, D, DP)


@triton.jit
def log_weights(b_q, b_k, of_queries, of_keys, block, at, TRANSPOSED: tl.constexpr, META: tl.constexpr):
    """log2 weights of a tile of queries and positions, one tile per key; -inf where a row does not see a column.

    Rows are those of the block: queries, or positions if TRANSPOSED. Columns start at index `at`.
    """
    dtype: tl.constexpr = b_q.dtype
    logs = ()
    for r in tl.static_range(len(b_k)):
        if TRANSPOSED:
            b_s = dot(b_k[r], tl.trans(b_q), dtype)
            terms = of_queries[r][None, :] + of_keys[r][:, None]
        else:
            b_s = dot(b_q, tl.trans(b_k[r]), dtype)
            terms = of_keys[r][None, :] + of_queries[r][:, None]
        # Shift the few intervals rather than the column numbers, which then are constants.
        column = tl.arange(0, b_s.shape[1])
        begin, end = block.begin - at, block.end - at
        visible = (column[None, :] >= begin[:, None]) & (column[None, :] <= end[:, None])
        logs = logs + (tl.where(visible, b_s * META.precisions[r] + terms, float("-inf")),)
    return logs


@triton.jit
def max_over_keys(logs):
    """The largest over the keys of a position."""
    row_max = logs[0]
    for r in tl.static_range(1, len(logs)):
        row_max = tl.maximum(row_max, logs[r])
    return row_max


@triton.jit
def key_weights(logs, HARD: tl.constexpr):
    """Weights of the keys of a position, which sum to its weight; if HARD, the largest ones share that of one."""
    weights = ()
    if HARD:
        row_max = max_over_keys(logs)
        equals = tl.zeros_like(row_max)
        for r in tl.static_range(len(logs)):
            equals += tl.where(logs[r] == row_max, 1.0, 0.0)
        share = tl.exp2(row_max) / equals
        for r in tl.static_range(len(logs)):
            weights = weights + (tl.where(logs[r] == row_max, share, 0.0),)
    else:
        for r in tl.static_range(len(logs)):
            weights = weights + (tl.exp2(logs[r]),)
    return weights


@triton.jit
def fwd(pairs, out, NORMALIZE: tl.constexpr, META: tl.constexpr):
    """Write outputs (B, H, N, D) and `pairs.of_queries`. Program: a block of queries of a head."""
    M: tl.constexpr = META.components
    BQ: tl.constexpr = META.block_q
    BK: tl.constexpr = META.block_kv
    VP: tl.constexpr = META.padded_value_dim
    length = pairs.length
    # The last queries of a causal sequence have the most work, so their programs start first.
    block = block_of_program(pairs.visible, pairs.kv_heads * META.group, length, True, BQ)
    kv = block.head // META.group

    b_q = load_tokens(
        pairs.q, block.batch, block.head, block.start, length, BQ, META.width, META.padded_width
    )
    squares = tl.zeros((BQ,), tl.float32)
    if META.gaussian:
        squares = tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1)
    of_queries = ()
    for r in tl.static_range(M):
        of_queries = of_queries + (squares * (-META.precisions[r] / 2),)
    b_o = tl.zeros((BQ, VP), tl.float32)
    sums = tl.zeros((BQ,), tl.float32)
    row_max = tl.full((BQ,), EMPTY, tl.float32)
    for at in range(tl.min(block.begin, 0), tl.max(block.end, 0) + 1, BK):
        b_k, b_v, of_keys = load_positions(pairs, block.batch, kv, at, META)
        logs = log_weights(b_q, b_k, of_queries, of_keys, block, at, False, META)
        position_max = max_over_keys(logs)
        new_max = tl.maximum(row_max, tl.max(position_max, 1))
        if META.hard:
            b_p = tl.exp2(position_max - new_max[:, None])
        else:
            b_p = tl.zeros((BQ, BK), tl.float32)
            for r in tl.static_range(M):
                b_p += tl.exp2(logs[r] - new_max[:, None])
        scale_old = tl.exp2(row_max - new_max)
        b_o = b_o * scale_old[:, None] + dot(b_p, b_v, b_q.dtype)
        sums = sums * scale_old + tl.sum(b_p, 1)
        row_max = new_max

    exists = tl.where(sums == 0, 1.0, sums)
    factor = 1 / exists if NORMALIZE else tl.exp2(row_max)
    divisor = row_max + tl.log2(exists) if NORMALIZE else tl.zeros((BQ,), tl.float32)
    store_tokens(out, block.entry, block.start, length, b_o * factor[:, None], META.value_dim, VP)
    for r in tl.static_range(M):
        terms = pairs.of_queries + (block.entry * M + r) * length
        tl.store(terms + block.rows, of_queries[r] - divisor, mask=block.rows < length)


@triton.jit
def bwd_dq(pairs, do, out, delta, dq, NORMALIZE: tl.constexpr, META: tl.constexpr):
    """Write dQ (B, H, N, d), and delta (B, H, N) float32 for `bwd_dkv`. Programs as in `fwd`."""
    BQ: tl.constexpr = META.block_q
    BK: tl.constexpr = META.block_kv
    DP: tl.constexpr = META.padded_width
    VP: tl.constexpr = META.padded_value_dim
    length = pairs.length
    block = block_of_program(pairs.visible, pairs.kv_heads * META.group, length, True, BQ)
    kv = block.head // META.group

    b_q = load_tokens(pairs.q, block.batch, block.head, block.start, length, BQ, META.width, DP)
    b_do = load_tokens(do, block.batch, block.head, block.start, length, BQ, META.value_dim, VP)
    dtype: tl.constexpr = b_q.dtype
    b_delta = tl.zeros((BQ,), tl.float32)
    if NORMALIZE:
        b_o = load_tokens(out, block.batch, block.head, block.start, length, BQ, META.value_dim, VP)
        b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    tl.store(delta + block.entry * length + block.rows, b_delta, mask=block.rows < length)
    of_queries = load_terms(pairs.of_queries, block.entry, block.start, length, BQ, META)
    b_dq = tl.zeros((BQ, DP), tl.float32)
    ds_sum = tl.zeros((BQ,), tl.float32)
    for at in range(tl.min(block.begin, 0), tl.max(block.end, 0) + 1, BK):
        b_k, b_v, of_keys = load_positions(pairs, block.batch, kv, at, META)
        logs = log_weights(b_q, b_k, of_queries, of_keys, block, at, False, META)
        b_p = key_weights(logs, META.hard)
        b_dp = dot(b_do, tl.trans(b_v), dtype) - b_delta[:, None]
        for r in tl.static_range(len(b_k)):
            b_ds = rounded(b_p[r] * b_dp * META.factors[r], dtype)
            b_dq += dot(b_ds, b_k[r], dtype)
            ds_sum += tl.sum(b_ds.to(tl.float32), 1)
    if META.gaussian:
        b_dq -= ds_sum[:, None] * b_q.to(tl.float32)
    store_tokens(dq, block.entry, block.start, length, b_dq, META.width, DP)


@triton.jit
def bwd_dkv(pairs, do, delta, dk, dv, dlog, META: tl.constexpr):
    """Write dK (B, H_kv, M, S, d), dV (B, H_kv, S, D) and gradients of log key weights (B, H_kv, M, S) float32.

    Program: a block of positions of a key head, which loops over the queries of all its query heads. Rows of tiles are
    positions, and `pairs.visible` is the interval of queries that see each.
    """
    M: tl.constexpr = META.components
    BQ: tl.constexpr = META.block_q
    BK: tl.constexpr = META.block_kv
    DP: tl.constexpr = META.padded_width
    VP: tl.constexpr = META.padded_value_dim
    length, kv_length = pairs.length, pairs.kv_length
    block = block_of_program(pairs.visible, pairs.kv_heads, kv_length, False, BK)

    b_k, b_v, of_keys = load_positions(pairs, block.batch, block.head, block.start, META)
    dtype: tl.constexpr = b_v.dtype
    b_dv = tl.zeros((BK, VP), tl.float32)
    b_dk = ()
    ds_sum = ()
    for _ in tl.static_range(M):
        b_dk = b_dk + (tl.zeros((BK, DP), tl.float32),)
        ds_sum = ds_sum + (tl.zeros((BK,), tl.float32),)
    # One loop over the queries of all heads: nested loops would hold the addresses of both in registers.
    low = tl.min(block.begin, 0)
    steps = tl.maximum(tl.cdiv(tl.max(block.end, 0) + 1 - low, BQ), 0)
    for step in range(META.group * steps):
        head = block.head * META.group + step // steps
        entry = block.entry * META.group + step // steps
        at = low + step % steps * BQ
        b_q = load_tokens(pairs.q, block.batch, head, at, length, BQ, META.width, DP)
        b_do = load_tokens(do, block.batch, head, at, length, BQ, META.value_dim, VP)
        of_queries = load_terms(pairs.of_queries, entry, at, length, BQ, META)
        b_delta = load_vector(delta + entry * length, at, length, BQ)
        logs = log_weights(b_q, b_k, of_queries, of_keys, block, at, True, META)
        b_p = key_weights(logs, META.hard)
        b_dp = dot(b_v, tl.trans(b_do), dtype) - b_delta[None, :]
        p_sum = b_p[0]
        for r in tl.static_range(1, M):
            p_sum += b_p[r]
        b_dv += dot(p_sum, b_do, dtype)
        new_dk = ()
        new_ds_sum = ()
        for r in tl.static_range(M):
            b_ds = rounded(b_p[r] * b_dp, dtype)
            new_dk = new_dk + (b_dk[r] + dot(b_ds, b_q, dtype),)
            new_ds_sum = new_ds_sum + (ds_sum[r] + tl.sum(b_ds.to(tl.float32), 1),)
        b_dk = new_dk
        ds_sum = new_ds_sum
    store_tokens(dv, block.entry, block.start, kv_length, b_dv, META.value_dim, VP)
    for r in tl.static_range(M):
        dk_of_key = b_dk[r]
        if META.gaussian:
            dk_of_key -= ds_sum[r][:, None] * b_k[r].to(tl.float32)
        component = block.entry * M + r
        store_tokens(dk, component, block.start, kv_length, dk_of_key * META.factors[r], META.width, DP)
        tl.store(dlog + component * kv_length + block.rows, ds_sum[r], mask=block.rows < kv_length)
