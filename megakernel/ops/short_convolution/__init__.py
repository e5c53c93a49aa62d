"""A causal filter of the last few tokens for every channel; see docs/formulas.md, 10."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import Implementation, Kernels, accum_dtype, choose
from megakernel.ops.documents import Positions, token_positions


def _kernels() -> ModuleType:
    from megakernel.ops.short_convolution import triton

    return triton


def by_taps(x: Tensor, weight: Tensor, before: Tensor, positions: Positions) -> Tensor:
    """The sum over taps of whole tensors, on any device."""
    dtype, length, width = accum_dtype(x.dtype), x.shape[-2], weight.shape[-1]
    inputs = torch.cat([before, x], -2).to(dtype)
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


FAST = (torch.float32, torch.bfloat16)
"""What torch convolves fast on a CPU, with sums in float32."""

FEW = 2**17
"""Numbers that lie in a core's cache while taps are summed: no order of them is faster."""

SHORT = 8
"""Of so many tokens one may lie less than W - 1 behind its document's first, or all go by taps."""


def by_rows(x: Tensor, weight: Tensor, before: Tensor, positions: Positions) -> Tensor:
    """torch's convolution of channels whose tokens lie in a row, and taps where a document begins.

    On a CPU it takes less than half of the time of whole tensors in float32, and keeps a third of the bytes.
    """
    width = weight.shape[-1]
    if x.numel() < FEW or x.dtype not in FAST:
        return by_taps(x, weight, before, positions)
    if isinstance(positions, int):
        back = torch.arange(width - 1, 0, -1, device=x.device)[:, None]
        return _convolved(_rows(x, before.masked_fill(back > positions, 0.0)), weight)
    places = positions.expand(len(x), -1)
    first = (places < width - 1).nonzero(as_tuple=True)
    if len(first[0]) * SHORT > places.numel():
        return by_taps(x, weight, before, positions)
    rows = _rows(x, before)
    sequence, token = (at[:, None] for at in first)
    spans = rows.movedim(-1, 1)[sequence, token + torch.arange(width, device=x.device)].movedim(1, -2)
    exact = by_taps(spans[..., -1:, :], weight, spans[..., :-1, :], places[first][:, None]).squeeze(-2)
    return _convolved(rows, weight).movedim(-2, 1).index_put(first, exact).movedim(1, -2)


def _rows(x: Tensor, before: Tensor) -> Tensor:
    """(B, ..., d, W - 1 + N)"""
    # Tokens in order first: to transpose them while they are strided takes five times as long.
    return torch.cat([before.transpose(-1, -2), x.contiguous().transpose(-1, -2)], -1)


def _convolved(rows: Tensor, weight: Tensor) -> Tensor:
    """(B, ..., N, d) of rows whose tokens are of one document."""
    filters = weight.to(rows.dtype).flatten(0, -2).unsqueeze(1)
    sums = F.conv1d(rows.flatten(1, -2), filters, groups=len(filters))
    return F.silu(sums).view(*rows.shape[:-1], -1).transpose(-1, -2).contiguous()


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": by_rows,
    "triton": Kernels("short_convolution", _kernels),
}
"""Backend -> implementation."""


def short_convolution(
    x: Tensor, weight: Tensor, before: Tensor, positions: Positions, *, backend: str | None = None
) -> Tensor:
    """silu(sum_t w_t x_(i - t)) over the t = 0 .. W - 1 that reach no further back than token i's document.

    Args:
        x: (B, ..., N, d).
        weight: (..., d, W); the last number of a channel is that of the token itself.
        before: (B, ..., W - 1, d), the tokens before these; of a document that begins with these any numbers.
        positions: (B, N) positions within documents, or the position of the first token of sequences that hold one
            document each.
        backend: chunked or triton; None takes the environment's MEGAKERNEL_BACKEND, else the kernels on a GPU and
            chunked elsewhere.

    Returns:
        The shape and dtype of x; computed in float32 or better.
    """
    return choose(IMPLEMENTATIONS, backend)(x, weight, before, positions)
