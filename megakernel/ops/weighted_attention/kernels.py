"""Triton kernels of weighted attention: outputs, and the gradients of queries and of keys, values and masses.

Blocks of queries meet blocks of positions, and only a tile of weights exists at once. Key r of position j weighs

    w_ijr = exp2(c_r q_i.k_jr + a_ir + b_jr)

with c_r the precision, b_jr the log of the key's mass, a_ir the negative log of what query i divides by, and for a
gaussian their shares of -|q - k|^2 / 2: squares are summed in float32 and never rounded. All are in units of log 2,
because the device has exp2. With the pull g_i of an output and delta_i = g_i.o_i (0 without normalization):

    s_ijr = w_ijr (g_i.v_j - delta_i)    dv_j = sum_ir w_ijr g_i    dlog m_jr = sum_i s_ijr
    dq_i = sum_jr p_r s_ijr (k_jr - q_i)    dk_jr = p_r sum_i s_ijr (q_i - k_jr)    (softmax: without the second term)

Both terms of a difference are weighed by the same s, rounded as the tensor cores take it: an offset that queries and
keys share then cancels, instead of amplifying the rounding.

Rows of a tile have an interval of columns that they see: keys first .. last of a query, and read backwards queries
first .. last of a key, since documents are contiguous.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import EMPTY, dot, load_rows, rounded, store_rows


@triton.jit
def load_span(first, last, rows, count):
    """First and last column that each row sees; rows outside see none."""
    inside = rows < count
    begin = tl.load(first + rows, mask=inside, other=2147483647)
    return begin, tl.load(last + rows, mask=inside, other=-1)


@triton.jit
def log_weights(products, precision: tl.constexpr, of_rows, of_columns, begin, end, at):
    """log2 of the weights of a tile of pairs whose first column is `at`, -inf where a row does not see a column."""
    logs = products * precision + of_columns[None, :] + of_rows[:, None]
    # Intervals move and column numbers stay: they are constants, and the intervals few.
    columns = tl.arange(0, products.shape[1])
    visible = (columns[None, :] >= (begin - at)[:, None]) & (columns[None, :] <= (end - at)[:, None])
    return tl.where(visible, logs, float("-inf"))


@triton.jit
def largest_of(logs):
    """The largest over the keys of a position."""
    top = logs[0]
    for r in tl.static_range(1, len(logs)):
        top = tl.maximum(top, logs[r])
    return top


@triton.jit
def key_weights(logs, HARD: tl.constexpr):
    """Weights of the keys of a position, whose sum is the position's: if HARD the largest alone, shared by equals."""
    if not HARD:
        weights = ()
        for r in tl.static_range(len(logs)):
            weights = weights + (tl.exp2(logs[r]),)
        return weights
    top = largest_of(logs)
    equals = tl.zeros_like(top)
    for r in tl.static_range(len(logs)):
        equals += tl.where(logs[r] == top, 1.0, 0.0)
    share = tl.exp2(top) / equals
    weights = ()
    for r in tl.static_range(len(logs)):
        weights = weights + (tl.where(logs[r] == top, share, 0.0),)
    return weights


@triton.jit
def load_keys(k, part, stride, count, C: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """The M keys of C positions from the one at `k` on, tiles (C, DP)."""
    keys = ()
    for _ in tl.static_range(M):
        keys = keys + (load_rows(k, stride, count, C, D, DP),)
        k += part
    return keys


@triton.jit
def load_terms(terms, rows, count, M: tl.constexpr):
    """What a and b of the head comment, (M, count), add to log weights.

    Anything does outside: nobody sees keys there, and queries there pull nothing.
    """
    found = ()
    for _ in tl.static_range(M):
        found = found + (tl.load(terms + rows, mask=rows < count, other=0.0),)
        terms += count
    return found


@triton.jit
def read(
    q,
    k,
    v,
    of_keys,
    first,
    last,
    out,
    of_queries,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_part,
    k_row,
    v_batch,
    v_head,
    v_row,
    span_batch,
    length,
    places,
    heads,
    blocks,
    G: tl.constexpr,
    PRECISIONS: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    HARD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Outputs (B, H, N, V), and a of the head comment (B, H, M, N) float32. Program: a block of queries of a head."""
    M: tl.constexpr = len(PRECISIONS)
    # The last queries of a causal row see most: their programs start first.
    start = (blocks - 1 - tl.program_id(0) % blocks) * BQ
    rows = start + tl.arange(0, BQ)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row, own = head // heads, head % heads
    kv = own // G
    far, left = start.to(tl.int64), length - start
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    k += row * k_batch + kv * k_head
    v += row * v_batch + kv * v_head
    of_keys += (row * (heads // G) + kv) * M * places
    begin, end = load_span(first + row * span_batch, last + row * span_batch, rows, length)

    queries = load_rows(q + row * q_batch + own * q_head + far * q_row, q_row, left, BQ, D, DP)
    own_terms = ()
    for r in tl.static_range(M):
        if GAUSSIAN:
            wide = queries.to(tl.float32)
            own_terms = own_terms + (tl.sum(wide * wide, 1) * (-PRECISIONS[r] / 2),)
        else:
            own_terms = own_terms + (tl.zeros((BQ,), tl.float32),)
    total = tl.zeros((BQ, VP), tl.float32)
    sums = tl.zeros((BQ,), tl.float32)
    top = tl.full((BQ,), EMPTY, tl.float32)
    for at in range(tl.min(begin, 0), tl.max(end, 0) + 1, BK):
        columns = at + tl.arange(0, BK)
        keys = load_keys(k + at * k_far, k_part, k_row, places - at, BK, M, D, DP)
        values = load_rows(v + at * v_far, v_row, places - at, BK, V, VP)
        terms = load_terms(of_keys, columns, places, M)
        logs = ()
        for r in tl.static_range(M):
            products = dot(queries, tl.trans(keys[r]), dtype)
            logs = logs + (log_weights(products, PRECISIONS[r], own_terms[r], terms[r], begin, end, at),)
        position = largest_of(logs)
        larger = tl.maximum(top, tl.max(position, 1))
        if HARD:
            weights = tl.exp2(position - larger[:, None])
        else:
            weights = tl.zeros((BQ, BK), tl.float32)
            for r in tl.static_range(M):
                weights += tl.exp2(logs[r] - larger[:, None])
        shrink = tl.exp2(top - larger)
        total = total * shrink[:, None] + dot(weights, values, dtype)
        sums = sums * shrink + tl.sum(weights, 1)
        top = larger

    exists = tl.where(sums == 0, 1.0, sums)
    factor = 1 / exists if NORMALIZE else tl.exp2(top)
    divisor = top + tl.log2(exists) if NORMALIZE else tl.zeros((BQ,), tl.float32)
    store_rows(out + (head * length + far) * V, V, left, total * factor[:, None], V, VP)
    for r in tl.static_range(M):
        tl.store(of_queries + (head * M + r) * length + rows, own_terms[r] - divisor, mask=rows < length)


@triton.jit
def pull_queries(
    q,
    k,
    v,
    of_keys,
    first,
    last,
    out,
    of_queries,
    pull,
    dq,
    delta,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_part,
    k_row,
    v_batch,
    v_head,
    v_row,
    pull_batch,
    pull_head,
    pull_row,
    span_batch,
    length,
    places,
    heads,
    blocks,
    G: tl.constexpr,
    PRECISIONS: tl.constexpr,
    FACTORS: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    HARD: tl.constexpr,
    NORMALIZE: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of queries (B, H, N, d), and delta (B, H, N) float32 for `pull_keys`. Programs as in `read`."""
    M: tl.constexpr = len(PRECISIONS)
    start = (blocks - 1 - tl.program_id(0) % blocks) * BQ
    rows = start + tl.arange(0, BQ)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row, own = head // heads, head % heads
    kv = own // G
    far, left = start.to(tl.int64), length - start
    k_far, v_far = tl.cast(k_row, tl.int64), tl.cast(v_row, tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    k += row * k_batch + kv * k_head
    v += row * v_batch + kv * v_head
    of_keys += (row * (heads // G) + kv) * M * places
    begin, end = load_span(first + row * span_batch, last + row * span_batch, rows, length)

    queries = load_rows(q + row * q_batch + own * q_head + far * q_row, q_row, left, BQ, D, DP)
    pulls = load_rows(pull + row * pull_batch + own * pull_head + far * pull_row, pull_row, left, BQ, V, VP)
    shift = tl.zeros((BQ,), tl.float32)
    if NORMALIZE:
        outputs = load_rows(out + (head * length + far) * V, V, left, BQ, V, VP)
        shift = tl.sum(pulls.to(tl.float32) * outputs.to(tl.float32), 1)
    tl.store(delta + head * length + rows, shift, mask=rows < length)
    own_terms = load_terms(of_queries + head * M * length, rows, length, M)
    total = tl.zeros((BQ, DP), tl.float32)
    pulled = tl.zeros((BQ,), tl.float32)
    for at in range(tl.min(begin, 0), tl.max(end, 0) + 1, BK):
        columns = at + tl.arange(0, BK)
        keys = load_keys(k + at * k_far, k_part, k_row, places - at, BK, M, D, DP)
        values = load_rows(v + at * v_far, v_row, places - at, BK, V, VP)
        terms = load_terms(of_keys, columns, places, M)
        logs = ()
        for r in tl.static_range(M):
            products = dot(queries, tl.trans(keys[r]), dtype)
            logs = logs + (log_weights(products, PRECISIONS[r], own_terms[r], terms[r], begin, end, at),)
        weights = key_weights(logs, HARD)
        slope = dot(pulls, tl.trans(values), dtype) - shift[:, None]
        for r in tl.static_range(M):
            share = rounded(weights[r] * slope * FACTORS[r], dtype)
            total += dot(share, keys[r], dtype)
            pulled += tl.sum(share.to(tl.float32), 1)
    if GAUSSIAN:
        total -= pulled[:, None] * queries.to(tl.float32)
    store_rows(dq + (head * length + far) * D, D, left, total, D, DP)


@triton.jit
def pull_keys(
    q,
    k,
    v,
    of_keys,
    first,
    last,
    of_queries,
    pull,
    delta,
    dk,
    dv,
    dlog,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_part,
    k_row,
    v_batch,
    v_head,
    v_row,
    pull_batch,
    pull_head,
    pull_row,
    span_batch,
    length,
    places,
    heads,
    blocks,
    G: tl.constexpr,
    PRECISIONS: tl.constexpr,
    FACTORS: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    HARD: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Gradients of keys (B, H_kv, M, S, d), values (B, H_kv, S, V) and log masses (B, H_kv, M, S) float32.

    Program: a block of positions of a key head, which meets the queries of its heads one after the other. first, last
    (B, S): the queries that see each position. Rows of tiles are keys.
    """
    M: tl.constexpr = len(PRECISIONS)
    start = (tl.program_id(0) % blocks) * BK
    rows = start + tl.arange(0, BK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    row, kv = head // heads, head % heads
    far, left = start.to(tl.int64), places - start
    q_far, pull_far = tl.cast(q_row, tl.int64), tl.cast(pull_row, tl.int64)
    dtype: tl.constexpr = q.dtype.element_ty
    begin, end = load_span(first + row * span_batch, last + row * span_batch, rows, places)

    keys = load_keys(k + row * k_batch + kv * k_head + far * k_row, k_part, k_row, left, BK, M, D, DP)
    values = load_rows(v + row * v_batch + kv * v_head + far * v_row, v_row, left, BK, V, VP)
    own_terms = load_terms(of_keys + head * M * places, rows, places, M)
    of_values = tl.zeros((BK, VP), tl.float32)
    totals = ()
    pulled = ()
    for _ in tl.static_range(M):
        totals = totals + (tl.zeros((BK, DP), tl.float32),)
        pulled = pulled + (tl.zeros((BK,), tl.float32),)
    # One loop over the queries of all heads: two inside each other would hold the addresses of both in registers.
    low = tl.min(begin, 0)
    steps = tl.maximum(tl.cdiv(tl.max(end, 0) + 1 - low, BQ), 0)
    for step in range(G * steps):
        own = kv * G + step // steps
        at = low + step % steps * BQ
        asking = row * heads * G + own
        columns = at + tl.arange(0, BQ)
        queries = load_rows(q + row * q_batch + own * q_head + at * q_far, q_row, length - at, BQ, D, DP)
        pulls = load_rows(
            pull + row * pull_batch + own * pull_head + at * pull_far, pull_row, length - at, BQ, V, VP
        )
        terms = load_terms(of_queries + asking * M * length, columns, length, M)
        shift = tl.load(delta + asking * length + columns, mask=columns < length, other=0.0)
        logs = ()
        for r in tl.static_range(M):
            products = dot(keys[r], tl.trans(queries), dtype)
            logs = logs + (log_weights(products, PRECISIONS[r], own_terms[r], terms[r], begin, end, at),)
        weights = key_weights(logs, HARD)
        slope = dot(values, tl.trans(pulls), dtype) - shift[None, :]
        position = weights[0]
        for r in tl.static_range(1, M):
            position += weights[r]
        of_values += dot(position, pulls, dtype)
        new_totals = ()
        new_pulled = ()
        for r in tl.static_range(M):
            share = rounded(weights[r] * slope, dtype)
            new_totals = new_totals + (totals[r] + dot(share, queries, dtype),)
            new_pulled = new_pulled + (pulled[r] + tl.sum(share.to(tl.float32), 1),)
        totals = new_totals
        pulled = new_pulled
    store_rows(dv + (head * places + far) * V, V, left, of_values, V, VP)
    for r in tl.static_range(M):
        total = totals[r]
        if GAUSSIAN:
            total -= pulled[r][:, None] * keys[r].to(tl.float32)
        component = head * M + r
        store_rows(dk + (component * places + far) * D, D, left, total * FACTORS[r], D, DP)
        tl.store(dlog + component * places + rows, pulled[r], mask=rows < places)
