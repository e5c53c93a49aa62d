"""Triton kernels of the short convolution, on tiles of tokens with all channels; only inputs are saved for backward.

With s_n = sum_u w_u x_(n - u) over the u <= p_n, the position of token n in its document, and y = silu(s):

    dx_m = sum_t w_t ds_(m + t)    dw_u = sum_n x_(n - u) ds_n    ds_n = silu'(s_n) dy_n

Backward recomputes s for each shift t, with W loads of cached tokens, instead of storing a tensor.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from megakernel.ops.kernels.features import store_rows


class FilterShape(NamedTuple):
    """Compile-time sizes of a call."""

    width: int
    """W, taps of a filter."""

    padded_taps: int
    channels: int
    """d"""

    padded: int
    """d padded to a power of two."""

    tokens: int
    """Tokens per tile."""

    span: int
    """Tokens per program."""


@triton.jit
def tap(weight, head, u, META: tl.constexpr):
    """w_u of the channels of a head, (DP,) float32. Memory orders a channel's weights from the oldest token on."""
    d = tl.arange(0, META.padded)
    numbers = weight + (head * META.channels + d) * META.width + (META.width - 1 - u)
    return tl.load(numbers, mask=d < META.channels, other=0.0).to(tl.float32)


@triton.jit
def positions_of(positions, start, batch, n, length):
    """Positions in their documents of tokens n (C,), which may be outside of the sequence."""
    if positions is None:
        p = start + n
    else:
        inside = (n >= 0) & (n < length)
        p = tl.load(positions + batch * length + n, mask=inside, other=0).to(tl.int32)
    return p


@triton.jit
def earlier(inputs, n, p, u: tl.constexpr, length, META: tl.constexpr):
    """x_(n - u) of tokens n (C,) as a tile (C, DP) float32; 0 if it is in another document or n is not a token.

    inputs: of one head, starting with the W - 1 tokens before the first.
    """
    d = tl.arange(0, META.padded)
    seen = (p >= u) & (n >= 0) & (n < length)
    places = inputs + ((n + (META.width - 1 - u))[:, None] * META.channels + d[None, :])
    return tl.load(places, mask=seen[:, None] & (d < META.channels)[None, :], other=0.0).to(tl.float32)


@triton.jit
def sum_of_taps(inputs, weight, head, n, p, length, META: tl.constexpr):
    """s of tokens n (C,), as a tile (C, DP) float32."""
    C: tl.constexpr = META.tokens
    DP: tl.constexpr = META.padded
    W: tl.constexpr = META.width
    total = tl.zeros((C, DP), tl.float32)
    for u in tl.static_range(W):
        total += earlier(inputs, n, p, u, length, META) * tap(weight, head, u, META)[None, :]
    return total


@triton.jit(do_not_specialize=["length", "start"])
def convolve(inputs, weight, positions, out, length, start, heads, META: tl.constexpr):
    """silu(s) (B, R, N, d) of inputs (B, R, W - 1 + N, d). Program: a span of tokens of a head."""
    entry = tl.program_id(0).to(tl.int64)
    batch, head = entry // heads, entry % heads
    x = inputs + entry * (length + META.width - 1) * META.channels
    begin = tl.program_id(1) * META.span
    for at in range(begin, tl.minimum(begin + META.span, length), META.tokens):
        n = at + tl.arange(0, META.tokens)
        p = positions_of(positions, start, batch, n, length)
        s = sum_of_taps(x, weight, head, n, p, length, META)
        place = out + (entry * length + at) * META.channels
        store_rows(place, META.channels, length - at, s * tl.sigmoid(s), META.channels, META.padded)


@triton.jit
def slope(inputs, weight, positions, grad, start, batch, head, n, length, META: tl.constexpr):
    """ds of tokens n, (C, DP) float32, 0 if n is not a token; and their positions."""
    p = positions_of(positions, start, batch, n, length)
    s = sum_of_taps(inputs, weight, head, n, p, length, META)
    share = tl.sigmoid(s)
    d = tl.arange(0, META.padded)
    inside = ((n >= 0) & (n < length))[:, None] & (d < META.channels)[None, :]
    dy = tl.load(grad + (n[:, None] * META.channels + d[None, :]), mask=inside, other=0.0).to(tl.float32)
    return dy * share * (1 + s * (1 - share)), p


@triton.jit(do_not_specialize=["length", "start"])
def convolve_backward(
    inputs, weight, positions, grad, dinputs, shares, length, start, heads, META: tl.constexpr
):
    """Gradients of inputs, and each span's part of the gradients of filters, shares (B, R, spans, W, d) float32.

    grad (B, R, N, d) is contiguous. Program: a span of inputs of a head, and as many tokens.
    """
    C: tl.constexpr = META.tokens
    D: tl.constexpr = META.channels
    DP: tl.constexpr = META.padded
    W: tl.constexpr = META.width
    entry = tl.program_id(0).to(tl.int64)
    batch, head = entry // heads, entry % heads
    x = inputs + entry * (length + W - 1) * D
    dy = grad + entry * length * D
    begin = tl.program_id(1) * META.span
    TP: tl.constexpr = META.padded_taps
    taps = tl.arange(0, TP)
    of_filter = tl.zeros((TP, DP), tl.float32)
    for at in range(begin, tl.minimum(begin + META.span, length + W - 1), C):
        m = at + tl.arange(0, C)
        of_inputs = tl.zeros((C, DP), tl.float32)
        for t in tl.static_range(W):
            n = m - (W - 1) + t
            ds, p = slope(x, weight, positions, dy, start, batch, head, n, length, META)
            of_inputs += tl.where((p >= t)[:, None], ds, 0.0) * tap(weight, head, t, META)[None, :]
        place = dinputs + (entry * (length + W - 1) + at) * D
        store_rows(place, D, length + W - 1 - at, of_inputs, D, DP)
        ds, p = slope(x, weight, positions, dy, start, batch, head, m, length, META)
        for u in tl.static_range(W):
            product = tl.sum(ds * earlier(x, m, p, u, length, META), 0)
            of_filter += tl.where((taps == u)[:, None], product[None, :], 0.0)
    spans = tl.num_programs(1)
    place = shares + (entry * spans + tl.program_id(1)) * (W * D)
    store_rows(place, D, W, of_filter, D, DP)
