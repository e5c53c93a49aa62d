"""Triton kernels of FastFood features: both Hadamard transforms, Pi and the feature map on one tile of tokens.

A tile is (R, K): R tokens, and the n numbers of each of their blocks beside each other, K = BP n with BP the blocks
padded to a power of two. With u = H (b * x), w = Pi u and z = H (g * w), the angles or exponents of a block are
y = factor s * z, factor = d^-1/4 n^-1/2. H and its transpose are one, so backward is, with t = H (factor s * dy),

    ds = factor dy * z    dg = t * w    db = x * H Pi^T (g * t)    dx = the sum over blocks of b * H Pi^T (g * t)

A program takes a span of the tokens of one head. What it adds to ds, dg and db is summed over programs afterwards.
"""

import triton
import triton.language as tl

from megakernel.ops.kernels.features import cos_sin, store_rows

WINDOW = tl.constexpr(16)
"""Numbers of a token that one pass of butterflies combines: as many as threads hold or pass on within a warp."""


@triton.constexpr_function
def log2(n):
    """k of n = 2^k."""
    return n.bit_length() - 1


@triton.jit
def butterflies(x, n: tl.constexpr):
    """H_n x along rows (rows, n): sums and differences of neighbours, each round bringing the next bit to the end."""
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(log2(n)):
        first, second = tl.split(tl.reshape(x, (rows, n // 2, 2)))
        pairs = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(pairs, (0, 2, 1)), (rows, n))
    return x


@triton.jit
def hadamard(x, n: tl.constexpr):
    """H_n x along rows (rows, n), by H_n = H_(n / 16) (x) H_16."""
    rows: tl.constexpr = x.shape[0]
    if n <= WINDOW:
        x = butterflies(x, n)
    else:
        rest: tl.constexpr = n // WINDOW
        x = butterflies(tl.reshape(x, (rows * rest, WINDOW)), WINDOW)
        x = tl.permute(tl.reshape(x, (rows, rest, WINDOW)), (0, 2, 1))
        x = hadamard(tl.reshape(x, (rows * WINDOW, rest)), rest)
        x = tl.permute(tl.reshape(x, (rows, WINDOW, rest)), (0, 2, 1))
        x = tl.reshape(x, (rows, n))
    return x


@triton.jit
def transform(x, n: tl.constexpr):
    """H_n on every block of a tile (R, K)."""
    shape: tl.constexpr = x.shape
    return tl.reshape(hadamard(tl.reshape(x, (shape[0] * (shape[1] // n), n)), n), shape)


@triton.jit
def permute(x, order, n: tl.constexpr):
    """Number order[i] of its block for number i of every block of a tile (R, K); order (K,)."""
    shape: tl.constexpr = x.shape
    lines: tl.constexpr = (shape[0] * (shape[1] // n), n)
    places = tl.reshape(tl.broadcast_to(order[None, :], shape), lines)
    return tl.reshape(tl.gather(tl.reshape(x, lines), places, 1), shape)


@triton.jit
def load_tokens(start, stride, left, R: tl.constexpr, D: tl.constexpr, n: tl.constexpr, K: tl.constexpr):
    """R tokens as a tile (R, K), the same in every block, zeros from column D of a block and from token `left` on."""
    rows, columns = tl.arange(0, R), tl.arange(0, K) % n
    inside = (rows < left)[:, None] & (columns < D)[None, :]
    return tl.load(start + (rows[:, None] * stride + columns[None, :]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_blocks(start, head, BLOCKS: tl.constexpr, n: tl.constexpr, K: tl.constexpr):
    """One number per place of a head's blocks, (K,), zeros in the padding."""
    k = tl.arange(0, K)
    return tl.load(start + head * (BLOCKS * n) + k, mask=k < BLOCKS * n, other=0)


@triton.jit
def feature_places(BLOCKS: tl.constexpr, n: tl.constexpr, K: tl.constexpr, D: tl.constexpr):
    """Which feature a place of the tile is, (K,), and whether it is one."""
    k = tl.arange(0, K)
    return k // n * D + k % n, (k % n < D) & (k < BLOCKS * n)


@triton.constexpr_function
def share_of_square(MAP):
    """What of |x|^2 the exponents of a map lose: a half estimates exp(q.k / sqrt(d)), all of it a Gaussian kernel."""
    return 0.5 if MAP == "favor" else 1.0


@triton.jit
def exponents(x, y, inside, MAP: tl.constexpr, D: tl.constexpr, n: tl.constexpr):
    """y less the share of |x|^2 of tokens x (R, K), -inf in padding."""
    share: tl.constexpr = share_of_square(MAP) * D**-0.5
    first_block = tl.arange(0, x.shape[1]) < n
    square = tl.sum(tl.where(first_block[None, :], x * x, 0.0), 1) * share
    return tl.where(inside[None, :], y - square[:, None], float("-inf"))


@triton.jit
def write_features(
    x,
    scales,
    gaussians,
    signs,
    order,
    values,
    logs,
    x_batch,
    x_head,
    x_row,
    length,
    heads,
    SPAN: tl.constexpr,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    n: tl.constexpr,
    D: tl.constexpr,
    MAP: tl.constexpr,
):
    """Values (B, H_kv, N, F) and log scales (B, H_kv, N). Program: (head of a row of the batch, span of tokens)."""
    head = tl.program_id(0)
    kv = head % heads
    M: tl.constexpr = BLOCKS * D
    F: tl.constexpr = 2 * M if MAP == "rks" else M
    factor: tl.constexpr = D**-0.25 * n**-0.5
    s = load_blocks(scales, kv, BLOCKS, n, K).to(tl.float32) * factor
    g = load_blocks(gaussians, kv, BLOCKS, n, K).to(tl.float32)
    b = load_blocks(signs, kv, BLOCKS, n, K).to(tl.float32)
    pi = load_blocks(order, kv, BLOCKS, n, K)
    place, inside = feature_places(BLOCKS, n, K, D)
    begin = tl.program_id(1) * SPAN
    x += (head // heads).to(tl.int64) * x_batch + kv.to(tl.int64) * x_head + begin * tl.cast(x_row, tl.int64)
    token = head.to(tl.int64) * length + begin
    rows = tl.arange(0, R)
    for at in range(0, tl.minimum(SPAN, length - begin), R):
        left = length - begin - at
        tokens = load_tokens(x + at * tl.cast(x_row, tl.int64), x_row, left, R, D, n, K)
        w = permute(transform(tokens * b[None, :], n), pi, n)
        y = transform(w * g[None, :], n) * s[None, :]
        stored = (rows < left)[:, None] & inside[None, :]
        places = values + (token + at) * F + rows[:, None] * F + place[None, :]
        if MAP == "rks":
            cos, sin = cos_sin(y)
            tl.store(places, cos * M**-0.5, mask=stored)
            tl.store(places + M, sin * M**-0.5, mask=stored)
        else:
            y = exponents(tokens, y, inside, MAP, D, n)
            log = tl.max(y, 1)
            tl.store(places, tl.exp(y - log[:, None]) * M**-0.5, mask=stored)
            tl.store(logs + token + at + rows, log, mask=rows < left)


@triton.jit
def write_gradients(
    grad,
    x,
    scales,
    gaussians,
    signs,
    order,
    inverse,
    logs,
    dx,
    parts,
    x_batch,
    x_head,
    x_row,
    length,
    heads,
    part,
    SPAN: tl.constexpr,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
    K: tl.constexpr,
    n: tl.constexpr,
    D: tl.constexpr,
    MAP: tl.constexpr,
):
    """dx (B, H_kv, N, d), and each program's share of ds, dg and db: parts (3, B H_kv spans, blocks n).

    Programs as in `write_features`; grad (B, H_kv, N, F) is the gradient of its values, `part` the size of one of the
    three parts, and `inverse` undoes `order`.
    """
    head = tl.program_id(0)
    kv = head % heads
    M: tl.constexpr = BLOCKS * D
    F: tl.constexpr = 2 * M if MAP == "rks" else M
    factor: tl.constexpr = D**-0.25 * n**-0.5
    s = load_blocks(scales, kv, BLOCKS, n, K).to(tl.float32) * factor
    g = load_blocks(gaussians, kv, BLOCKS, n, K).to(tl.float32)
    b = load_blocks(signs, kv, BLOCKS, n, K).to(tl.float32)
    pi = load_blocks(order, kv, BLOCKS, n, K)
    back = load_blocks(inverse, kv, BLOCKS, n, K)
    place, inside = feature_places(BLOCKS, n, K, D)
    ds = tl.zeros((K,), tl.float32)
    dg = tl.zeros((K,), tl.float32)
    db = tl.zeros((K,), tl.float32)
    begin = tl.program_id(1) * SPAN
    x += (head // heads).to(tl.int64) * x_batch + kv.to(tl.int64) * x_head + begin * tl.cast(x_row, tl.int64)
    token = head.to(tl.int64) * length + begin
    rows = tl.arange(0, R)
    first_block = tl.arange(0, K) < n
    for at in range(0, tl.minimum(SPAN, length - begin), R):
        left = length - begin - at
        tokens = load_tokens(x + at * tl.cast(x_row, tl.int64), x_row, left, R, D, n, K)
        w = permute(transform(tokens * b[None, :], n), pi, n)
        z = transform(w * g[None, :], n)
        stored = (rows < left)[:, None] & inside[None, :]
        places = grad + (token + at) * F + rows[:, None] * F + place[None, :]
        dy = tl.load(places, mask=stored, other=0.0) * M**-0.5
        if MAP == "rks":
            cos, sin = cos_sin(z * s[None, :])
            dy = tl.load(places + M, mask=stored, other=0.0) * M**-0.5 * cos - dy * sin
        else:
            log = tl.load(logs + token + at + rows, mask=rows < left, other=0.0)
            y = exponents(tokens, z * s[None, :], inside, MAP, D, n)
            dy = dy * tl.exp(y - log[:, None])
        ds += tl.sum(dy * z, 0)
        t = transform(dy * s[None, :], n)
        dg += tl.sum(t * w, 0)
        a = transform(permute(t * g[None, :], back, n), n)
        db += tl.sum(a * tokens, 0)
        a *= b[None, :]
        if MAP != "rks":
            slope: tl.constexpr = -2 * share_of_square(MAP) * D**-0.5
            a += tl.where(first_block[None, :], tokens, 0.0) * (tl.sum(dy, 1) * slope)[:, None]
        of_token = tl.sum(tl.reshape(a, (R, K // n, n)), 1)
        store_rows(dx + (token + at) * D, D, left, of_token, D, n)
    k = tl.arange(0, K)
    entry = head.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    places = parts + entry * (BLOCKS * n) + k
    tl.store(places, ds * factor, mask=k < BLOCKS * n)
    tl.store(places + part, dg, mask=k < BLOCKS * n)
    tl.store(places + 2 * tl.cast(part, tl.int64), db, mask=k < BLOCKS * n)
