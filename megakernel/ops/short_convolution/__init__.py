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


IMPLEMENTATIONS: dict[str, Implementation] = {
    "chunked": by_taps,
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
