"""Causal depthwise convolution over the last few tokens, followed by silu; see docs/formulas.md, 10."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.documents import Positions, token_positions
from megakernel.ops.tensors import accum_dtype


def _kernels() -> ModuleType:
    from megakernel.ops.short_convolution import triton

    return triton


def by_taps(x: Tensor, weight: Tensor, before: Tensor | None, positions: Positions) -> Tensor:
    """One multiply-add of whole tensors per tap, on any device."""
    dtype, length, width = accum_dtype(x.dtype), x.shape[-2], weight.shape[-1]
    inputs = torch.cat([_or_zeros(before, x, width), x], -2).to(dtype)
    taps = weight.to(dtype).movedim(-1, 0).unsqueeze(-2)
    at = token_positions(positions, length, x.device)
    at = at.view(len(at), *[1] * (x.dim() - 3), length, 1)
    out = inputs[..., width - 1 :, :] * taps[-1]
    for back in range(1, width):
        earlier = inputs[..., width - 1 - back : width - 1 - back + length, :]
        if not isinstance(positions, int) or positions < back:
            earlier = earlier.masked_fill(at < back, 0.0)
        out = out + earlier * taps[-1 - back]
    return F.silu(out).to(x.dtype)


FAST_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that torch convolves fast on a CPU, with float32 sums."""

CACHED_ELEMENTS = 2**17
"""Elements that fit into a core's cache while taps are summed; for fewer, `by_taps` is as fast."""

TOKENS_PER_START = 8
"""If more than one in this many tokens is among the first W - 1 of its document, all tokens go through `by_taps`."""


def _or_zeros(before: Tensor | None, x: Tensor, width: int) -> Tensor:
    return x.new_zeros(*x.shape[:-2], width - 1, x.shape[-1]) if before is None else before


def by_rows(x: Tensor, weight: Tensor, before: Tensor | None, positions: Positions) -> Tensor:
    """torch's conv1d with channels as rows, corrected by `by_taps` at document starts.

    On a CPU, it takes less than half the time of `by_taps` in float32, and stores a third of the bytes for backward.
    """
    width = weight.shape[-1]
    # A compiler fuses the taps, and cannot look at where documents start.
    if x.numel() < CACHED_ELEMENTS or x.dtype not in FAST_DTYPES or torch.compiler.is_compiling():
        return by_taps(x, weight, before, positions)
    before = _or_zeros(before, x, width)
    if isinstance(positions, int):
        back = torch.arange(width - 1, 0, -1, device=x.device)[:, None]
        return _convolved(_rows(x, before.masked_fill(back > positions, 0.0)), weight)
    at = positions.expand(len(x), -1)
    near_start = (at < width - 1).nonzero(as_tuple=True)
    if len(near_start[0]) * TOKENS_PER_START > at.numel():
        return by_taps(x, weight, before, positions)
    rows = _rows(x, before)
    sequence, token = (index[:, None] for index in near_start)
    spans = rows.movedim(-1, 1)[sequence, token + torch.arange(width, device=x.device)].movedim(1, -2)
    exact = by_taps(spans[..., -1:, :], weight, spans[..., :-1, :], at[near_start][:, None]).squeeze(-2)
    return _convolved(rows, weight).movedim(-2, 1).index_put(near_start, exact).movedim(1, -2)


def _rows(x: Tensor, before: Tensor) -> Tensor:
    """(B, ..., d, W - 1 + N)"""
    # Contiguous first: transposing strided tokens takes five times as long.
    return torch.cat([before.transpose(-1, -2), x.contiguous().transpose(-1, -2)], -1)


def _convolved(rows: Tensor, weight: Tensor) -> Tensor:
    """silu(conv1d), (B, ..., N, d), of rows, regardless of document boundaries."""
    filters = weight.to(rows.dtype).flatten(0, -2).unsqueeze(1)
    sums = F.conv1d(rows.flatten(1, -2), filters, groups=len(filters))
    return F.silu(sums).view(*rows.shape[:-1], -1).transpose(-1, -2).contiguous()


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": by_rows,
    "reference": by_taps,
    "triton": Kernels("short_convolution", _kernels),
}
"""Backend -> implementation."""


def short_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None, positions: Positions, *, backend: str | None = None
) -> Tensor:
    """silu(sum_t w_t x_(i - t)), over those t = 0 .. W - 1 for which token i - t is in token i's document.

    Args:
        x: (B, ..., N, d).
        weight: (..., d, W); a channel's last weight is that of the token itself.
        before: (B, ..., W - 1, d), the preceding tokens, None: zeros; ignored for a document that begins at the first
            token.
        positions: (B, N) positions within documents, or the position of the first token if each sequence holds one
            document.
        backend: reference, chunked or triton; None reads MEGAKERNEL_BACKEND from the environment, and by default takes
            triton on a GPU and chunked elsewhere.

    Returns:
        Same shape and dtype as x; computed in float32 or better.
    """
    return choose(IMPLEMENTATIONS, backend)(x, weight, before, positions)
