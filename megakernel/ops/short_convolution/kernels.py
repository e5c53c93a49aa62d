"""Triton kernels of the short convolution. A program walks along a span of tokens and keeps the last ones in registers.

With s_n = sum_u w_u x_(n - u) over the u <= p_n, the position of token n in its document, and y = silu(s):

    dx_m = sum_t w_t ds_(m + t)    dw_u = sum_n x_(n - u) ds_n    ds_n = silu'(s_n) dy_n

A program reads each token of its span once, and the W - 1 before it. Backward computes s again, and adds ds_n to the
gradients of tokens n - W + 1 .. n, of which the first is then complete; it also reads the W - 1 tokens after the span.
Tiles are (heads, channels); those of several tokens are in tuples, the earliest first.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernels.primitives import INTERPRETED, exp, rounded


class FilterShape(NamedTuple):
    """Compile-time sizes of a call."""

    width: int
    """W, taps of a filter."""

    heads: int
    """R"""

    channels: int
    """d"""

    padded: int
    """d padded to a power of two."""

    heads_at_once: int
    """Heads of a program."""

    tokens_at_once: int
    """Tokens that are loaded before the first of them is used."""

    span: int
    """Tokens of a program, a multiple of `tokens_at_once`."""


@triton.jit
def added(tiles, tile):
    """A tuple with one more tile."""
    return tiles + (tile,)  # noqa: RUF005 (Triton has no starred expressions)


@triton.jit
def channels_of_program(META: tl.constexpr):
    """Heads (HB, 1) and channels (1, DP) of a program, and a mask of those that exist."""
    head = tl.program_id(1) * META.heads_at_once + tl.arange(0, META.heads_at_once)[:, None]
    d = tl.arange(0, META.padded)[None, :]
    return head, d, (head < META.heads) & (d < META.channels)


@triton.jit
def channel_ptrs(rows, head, d):
    """Pointers to the channels of the program's sequence at its first token."""
    return rows.pointer + (tl.program_id(2).to(tl.int64) * rows.batch + head.to(tl.int64) * rows.head + d)


@triton.jit
def load_taps(weight, head, d, inside, META: tl.constexpr):
    """w_(W-1) .. w_0 as float32 tiles, in the order in which memory has a channel's weights."""
    W: tl.constexpr = META.width
    ptrs = weight + (head * META.channels + d) * W
    taps = ()
    for i in tl.static_range(W):
        taps = added(taps, tl.load(ptrs + i, mask=inside, other=0.0).to(tl.float32))
    return taps


@triton.jit
def load_before(x, before, n, head, d, inside, META: tl.constexpr):
    """x_(n-W+1) .. x_(n-1) as float32 tiles; `before` has those before the first token, None: zeros."""
    W: tl.constexpr = META.width
    tokens = ()
    for i in tl.static_range(W - 1):
        at = n - (W - 1 - i)
        ptr = channel_ptrs(x, head, d) + at * x.row
        token = tl.load(ptr, mask=inside & (at >= 0), other=0.0).to(tl.float32)
        if before is not None:
            ptr = channel_ptrs(before, head, d) + (n + i) * before.row
            token += tl.load(ptr, mask=inside & (at < 0), other=0.0).to(tl.float32)
        tokens = added(tokens, token)
    return tokens


@triton.jit
def load_tokens(rows, n, length, head, d, inside, COUNT: tl.constexpr):
    """COUNT tokens from token n on, as tiles; 0 from `length` on."""
    ptr = channel_ptrs(rows, head, d) + n * rows.row
    tokens = ()
    for i in tl.static_range(COUNT):
        tokens = added(tokens, tl.load(ptr, mask=inside & (n + i < length), other=0.0))
        ptr += rows.row
    return tokens


@triton.jit
def load_positions(positions, start, n, length, COUNT: tl.constexpr):
    """Positions in their documents of COUNT tokens from token n on."""
    token_positions = ()
    for i in tl.static_range(COUNT):
        if positions is None:
            p = start + n + i
        else:
            ptr = positions + (tl.program_id(2).to(tl.int64) * length + n + i)
            p = tl.load(ptr, mask=n + i < length, other=0).to(tl.int32)
        token_positions = added(token_positions, p)
    return token_positions


@triton.jit
def seen_by(p, tokens, META: tl.constexpr):
    """The W tiles `tokens`, of which the last is that of a token at position p: 0 for those of other documents."""
    W: tl.constexpr = META.width
    seen = ()
    for i in tl.static_range(W - 1):
        seen = added(seen, tl.where(p >= W - 1 - i, tokens[i], 0.0))
    return added(seen, tokens[W - 1])


@triton.jit
def sum_of_products(tokens, taps, META: tl.constexpr):
    """s of the last of W tokens."""
    W: tl.constexpr = META.width
    total = tokens[0] * taps[0]
    for i in tl.static_range(1, W):
        total += tokens[i] * taps[i]
    return total


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), with an approximate reciprocal (to 1 in 2^23): an exact one takes five more instructions."""
    if INTERPRETED:
        y = tl.sigmoid(x)
    else:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + exp(-x)], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit(do_not_specialize=["length", "start"])
def convolve(x, before, weight, positions, out, length, start, META: tl.constexpr):
    """silu(s) of x, both `Rows` (B, R, N, d). Grid: spans of tokens, blocks of heads, sequences."""
    head, d, inside = channels_of_program(META)
    STEP: tl.constexpr = META.tokens_at_once
    taps = load_taps(weight, head, d, inside, META)
    begin = tl.program_id(0).to(tl.int64) * META.span
    stop = tl.minimum(begin + META.span, length)
    earlier = load_before(x, before, begin, head, d, inside, META)
    for at in range(begin, stop, STEP):
        tokens = load_tokens(x, at, length, head, d, inside, STEP)
        p = load_positions(positions, start, at, length, STEP)
        for i in tl.static_range(STEP):
            tile = added(earlier, tokens[i].to(tl.float32))
            earlier = tile[1:]
            s = sum_of_products(seen_by(p[i], tile, META), taps, META)
            y = rounded(s * sigmoid(s), out.pointer.dtype.element_ty)
            tl.store(channel_ptrs(out, head, d) + (at + i) * out.row, y, mask=inside & (at + i < length))


@triton.jit
def add_token(token, grad, p, earlier, taps, dtokens, META: tl.constexpr):
    """Add what a token x_n contributes to gradients.

    earlier: x_(n-W+1) .. x_(n-1); dtokens: their dx so far. Returns ds_n; the W tokens x_(n-W+1) .. x_n, 0 if x_n does
    not see them; the next token's `earlier`; and dx of these W tokens so far.
    """
    tile = added(earlier, token.to(tl.float32))
    seen = seen_by(p, tile, META)
    s = sum_of_products(seen, taps, META)
    share = sigmoid(s)
    ds = grad.to(tl.float32) * (share * (1 + s * (1 - share)))
    W: tl.constexpr = META.width
    sums = ()
    for i in tl.static_range(W - 1):
        sums = added(sums, dtokens[i] + tl.where(p >= W - 1 - i, ds, 0.0) * taps[i])
    return ds, seen, tile[1:], added(sums, ds * taps[W - 1])


@triton.jit
def store_gradient(dx, dbefore, m, begin, length, tile, head, d, inside, META: tl.constexpr):
    """Store the gradient of token m, in the program's span or, by the first program, before the sequence."""
    ptr = channel_ptrs(dx, head, d) + m * dx.row
    tl.store(ptr, rounded(tile, dx.pointer.dtype.element_ty), mask=inside & (m >= begin) & (m < length))
    if dbefore is not None:
        ptr = channel_ptrs(dbefore, head, d) + (m + META.width - 1) * dbefore.row
        is_before = (m < 0) & (begin == 0)
        tl.store(ptr, rounded(tile, dbefore.pointer.dtype.element_ty), mask=inside & is_before)


@triton.jit(do_not_specialize=["length", "start"])
def convolve_backward(
    x, before, weight, positions, grad, dx, dbefore, dweight_parts, length, start, META: tl.constexpr
):
    """Gradients of x and `before`, and each span's part of the filters', shares (B, spans, R, d, W) float32.

    x, grad, dx: `Rows` (B, R, N, d). Grid: see `convolve`.
    """
    W: tl.constexpr = META.width
    STEP: tl.constexpr = META.tokens_at_once
    head, d, inside = channels_of_program(META)
    taps = load_taps(weight, head, d, inside, META)
    begin = tl.program_id(0).to(tl.int64) * META.span
    stop = tl.minimum(begin + META.span, length)
    earlier = load_before(x, before, begin, head, d, inside, META)
    zeros = tl.zeros_like(taps[0])
    dtokens = ()
    for _ in tl.static_range(W - 1):
        dtokens = added(dtokens, zeros)
    dtaps = added(dtokens, zeros)
    for at in range(begin, stop, STEP):
        tokens = load_tokens(x, at, length, head, d, inside, STEP)
        grads = load_tokens(grad, at, length, head, d, inside, STEP)
        p = load_positions(positions, start, at, length, STEP)
        for i in tl.static_range(STEP):
            ds, seen, earlier, dtile = add_token(tokens[i], grads[i], p[i], earlier, taps, dtokens, META)
            store_gradient(dx, dbefore, at + i - (W - 1), begin, length, dtile[0], head, d, inside, META)
            dtokens = dtile[1:]
            sums = ()
            for tap in tl.static_range(W):
                sums = added(sums, dtaps[tap] + seen[tap] * ds)
            dtaps = sums
    # The span's last tokens also get gradients from the first ones of the next span.
    at = begin + tl.cdiv(stop - begin, STEP) * STEP
    tokens = load_tokens(x, at, length, head, d, inside, W - 1)
    grads = load_tokens(grad, at, length, head, d, inside, W - 1)
    p = load_positions(positions, start, at, length, W - 1)
    for i in tl.static_range(W - 1):
        _, _, earlier, dtile = add_token(tokens[i], grads[i], p[i], earlier, taps, dtokens, META)
        store_gradient(dx, dbefore, at + i - (W - 1), begin, length, dtile[0], head, d, inside, META)
        dtokens = dtile[1:]
    entry = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    ptrs = dweight_parts + ((entry * META.heads + head) * META.channels + d) * W
    for tap in tl.static_range(W):
        tl.store(ptrs + tap, dtaps[tap], mask=inside)
