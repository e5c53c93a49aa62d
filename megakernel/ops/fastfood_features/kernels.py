"""Triton kernels of FastFood features: both Hadamard transforms, Pi and the feature map on one tile of tokens.

A tile is (R, K): R tokens with the n elements of all their blocks, K = BP n, where BP is the number of blocks padded to
a power of two. With u = H (b * x), w = Pi u and z = H (g * w), the angles or exponents of a block are y = factor s * z,
factor = d^-1/4 n^-1/2. H is symmetric, so backward is, with t = H (factor s * dy),

    ds = factor dy * z    dg = t * w    db = x * H Pi^T (g * t)    dx = the sum over blocks of b * H Pi^T (g * t)

A program takes a span of the tokens of one head. Its parts of ds, dg and db are summed over programs afterwards.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernels.features import cos_sin, store_rows

WINDOW = tl.constexpr(16)
"""Elements of a token that one pass of butterflies combines: as many as threads hold or exchange within a warp."""


class Parts(NamedTuple):
    """The parts of a FastFood, contiguous (H_kv, blocks, n)."""

    scales: Any
    gaussians: Any
    signs: Any
    permutation: Any


class FeatureShape(NamedTuple):
    """Compile-time sizes of a launch."""

    span: int
    """Tokens per program."""

    tokens: int
    """R."""

    blocks: int
    size: int
    """n."""

    padded: int
    """K."""

    width: int
    """d."""

    name: str
    """Name of the feature map."""

    @property
    def rows(self) -> int:
        """M."""
        return self.blocks * self.width

    @property
    def features(self) -> int:
        """F."""
        return self.rows * (2 if self.name == "rks" else 1)

    @property
    def square_share(self) -> float:
        """Factor of |x|^2 in exponents: 0.5 / sqrt(d) to estimate exp(q.k / sqrt(d)), 1 / sqrt(d) a Gaussian kernel."""
        return (0.5 if self.name == "favor" else 1.0) * self.width**-0.5


@triton.constexpr_function
def log2(n):
    """k for n = 2^k."""
    return n.bit_length() - 1


@triton.jit
def butterflies(x, n: tl.constexpr):
    """H_n x along rows (rows, n): sums and differences of neighbors; each round moves the next index bit to the end."""
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
    """Permute every block of a tile (R, K): element i becomes element order[i] of its block; order (K,)."""
    shape: tl.constexpr = x.shape
    lines: tl.constexpr = (shape[0] * (shape[1] // n), n)
    places = tl.reshape(tl.broadcast_to(order[None, :], shape), lines)
    return tl.reshape(tl.gather(tl.reshape(x, lines), places, 1), shape)


@triton.jit
def load_tokens(start, stride, left, META: tl.constexpr):
    """R tokens as a tile (R, K), repeated in every block; zeros from column d of a block and from token `left` on."""
    rows, columns = tl.arange(0, META.tokens), tl.arange(0, META.padded) % META.size
    inside = (rows < left)[:, None] & (columns < META.width)[None, :]
    return tl.load(start + (rows[:, None] * stride + columns[None, :]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_part(part, kv, META: tl.constexpr):
    """One diagonal or permutation of a head's blocks, (K,); zeros in the padding."""
    k = tl.arange(0, META.padded)
    numbers: tl.constexpr = META.blocks * META.size
    return tl.load(part + kv * numbers + k, mask=k < numbers, other=0)


@triton.jit
def load_parts(parts, kv, META: tl.constexpr):
    """S (times `factor`), G and B of a head, (K,) float32, and Pi."""
    factor: tl.constexpr = META.width**-0.25 * META.size**-0.5
    s = load_part(parts.scales, kv, META).to(tl.float32) * factor
    g = load_part(parts.gaussians, kv, META).to(tl.float32)
    b = load_part(parts.signs, kv, META).to(tl.float32)
    return s, g, b, load_part(parts.permutation, kv, META)


@triton.jit
def feature_places(META: tl.constexpr):
    """The feature index of each column of a tile, (K,), and a mask of the columns that are features."""
    k = tl.arange(0, META.padded)
    inside = (k % META.size < META.width) & (k < META.blocks * META.size)
    return k // META.size * META.width + k % META.size, inside


@triton.jit
def span_of_program(x, length, heads, META: tl.constexpr):
    """The program's head, and its first token: place in the sequence, index among all tokens, and pointer."""
    head = tl.program_id(0)
    begin = tl.program_id(1) * META.span
    start = x.pointer + (head // heads).to(tl.int64) * x.batch + (head % heads).to(tl.int64) * x.head
    return head, begin, head.to(tl.int64) * length + begin, start + begin * tl.cast(x.row, tl.int64)


@triton.jit
def exponents(x, y, inside, META: tl.constexpr):
    """y minus META.square_share times |x|^2 of tokens x (R, K); -inf in padding."""
    first_block = tl.arange(0, META.padded) < META.size
    square = tl.sum(tl.where(first_block[None, :], x * x, 0.0), 1) * META.square_share
    return tl.where(inside[None, :], y - square[:, None], float("-inf"))


@triton.jit
def write_features(x, parts, features, logs, length, heads, META: tl.constexpr):
    """Features (B, H_kv, N, F) and log scales (B, H_kv, N). Program: (head of a sequence, span of tokens)."""
    R: tl.constexpr = META.tokens
    n: tl.constexpr = META.size
    coefficient: tl.constexpr = META.rows**-0.5
    head, begin, token, start = span_of_program(x, length, heads, META)
    s, g, b, pi = load_parts(parts, head % heads, META)
    place, inside = feature_places(META)
    rows = tl.arange(0, R)
    for at in range(0, tl.minimum(META.span, length - begin), R):
        left = length - begin - at
        tokens = load_tokens(start + at * tl.cast(x.row, tl.int64), x.row, left, META)
        w = permute(transform(tokens * b[None, :], n), pi, n)
        y = transform(w * g[None, :], n) * s[None, :]
        stored = (rows < left)[:, None] & inside[None, :]
        places = features + (token + at) * META.features + rows[:, None] * META.features + place[None, :]
        if META.name == "rks":
            cos, sin = cos_sin(y)
            tl.store(places, cos * coefficient, mask=stored)
            tl.store(places + META.rows, sin * coefficient, mask=stored)
        else:
            y = exponents(tokens, y, inside, META)
            log = tl.max(y, 1)
            tl.store(places, tl.exp(y - log[:, None]) * coefficient, mask=stored)
            tl.store(logs + token + at + rows, log, mask=rows < left)


@triton.jit
def write_gradients(grad, x, parts, inverse, logs, dx, shares, length, heads, META: tl.constexpr):
    """dx (B, H_kv, N, d), and each program's part of ds, dg and db: shares (3, B H_kv spans, blocks n).

    Programs as in `write_features`; grad (B, H_kv, N, F) is the gradient of the features, `inverse` the inverse of Pi.
    """
    R: tl.constexpr = META.tokens
    K: tl.constexpr = META.padded
    n: tl.constexpr = META.size
    coefficient: tl.constexpr = META.rows**-0.5
    factor: tl.constexpr = META.width**-0.25 * META.size**-0.5
    head, begin, token, start = span_of_program(x, length, heads, META)
    s, g, b, pi = load_parts(parts, head % heads, META)
    back = load_part(inverse, head % heads, META)
    place, inside = feature_places(META)
    ds = tl.zeros((K,), tl.float32)
    dg = tl.zeros((K,), tl.float32)
    db = tl.zeros((K,), tl.float32)
    rows = tl.arange(0, R)
    first_block = tl.arange(0, K) < n
    for at in range(0, tl.minimum(META.span, length - begin), R):
        left = length - begin - at
        tokens = load_tokens(start + at * tl.cast(x.row, tl.int64), x.row, left, META)
        w = permute(transform(tokens * b[None, :], n), pi, n)
        z = transform(w * g[None, :], n)
        stored = (rows < left)[:, None] & inside[None, :]
        places = grad + (token + at) * META.features + rows[:, None] * META.features + place[None, :]
        dy = tl.load(places, mask=stored, other=0.0) * coefficient
        if META.name == "rks":
            cos, sin = cos_sin(z * s[None, :])
            dy = tl.load(places + META.rows, mask=stored, other=0.0) * coefficient * cos - dy * sin
        else:
            log = tl.load(logs + token + at + rows, mask=rows < left, other=0.0)
            dy = dy * tl.exp(exponents(tokens, z * s[None, :], inside, META) - log[:, None])
        ds += tl.sum(dy * z, 0)
        t = transform(dy * s[None, :], n)
        dg += tl.sum(t * w, 0)
        a = transform(permute(t * g[None, :], back, n), n)
        db += tl.sum(a * tokens, 0)
        a *= b[None, :]
        if META.name != "rks":
            slope = tl.sum(dy, 1) * (-2 * META.square_share)
            a += tl.where(first_block[None, :], tokens, 0.0) * slope[:, None]
        of_token = tl.sum(tl.reshape(a, (R, K // n, n)), 1)
        store_rows(dx + (token + at) * META.width, META.width, left, of_token, META.width, n)
    numbers: tl.constexpr = META.blocks * META.size
    k = tl.arange(0, K)
    entry = head.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    programs = tl.cast(tl.num_programs(0), tl.int64) * tl.num_programs(1)
    places = shares + entry * numbers + k
    tl.store(places, ds * factor, mask=k < numbers)
    tl.store(places + programs * numbers, dg, mask=k < numbers)
    tl.store(places + 2 * programs * numbers, db, mask=k < numbers)
