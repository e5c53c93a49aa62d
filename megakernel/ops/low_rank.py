"""Low-rank compression along the sequence: landmarks E x of tokens x (docs/formulas.md, 3)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import choose
from megakernel.ops.tensors import accum_dtype

SLICE = 4096
"""Tokens converted to float32 at once on a CPU."""


def compress(
    x: Tensor, pool: Tensor, *, first: int = 0, length: int | None = None, backend: str | None = None
) -> Tensor:
    """Contribution to E x of the tokens `first` .. `first` + n - 1 of sequences of `length` tokens.

    Every block of b tokens has r landmarks, each a weighted sum of the block's tokens. Linformer is one block as long
    as the longest sequence; shorter sequences use its first columns. Contributions of consecutive parts of a sequence
    add up to E x, wherever it is split.

    Args:
        x: (..., n, c) tokens; (..., H, n, c) if E is per head.
        pool: E, (r, b) or (H, r, b).
        first: index of the first token in its sequence.
        length: tokens of the whole sequence; None: n.
        backend: reference or chunked.

    Returns:
        (..., L, c) with L = r ceil(length / b), in float32 or better, so that a total of contributions is rounded only
        once, by the caller. If x is in half precision, the factors of E x are too, but not its sums.

    Raises:
        ValueError: tokens beyond the sequence.
    """
    length = x.shape[-2] if length is None else length
    if first < 0 or first + x.shape[-2] > length:
        raise ValueError(
            f"first={first}: {x.shape[-2]} tokens from there do not lie in a sequence of length={length}; change one"
        )
    return choose(IMPLEMENTATIONS, backend)(x, pool, first, length)


def chunked(x: Tensor, pool: Tensor, first: int, length: int) -> Tensor:
    """Matrix products per block, without the zeros of E and without copies of x."""
    rank, size = pool.shape[-2:]
    tokens = x.shape[-2]
    before, inside = divmod(first, size)
    # The end of a block that began in the previous shard, whole blocks, and the start of one that the next continues.
    lead = min(tokens, -first % size)
    whole, rest = divmod(tokens - lead, size)
    parts = []
    if lead:
        parts.append(_product(pool[..., inside : inside + lead], x[..., :lead, :]))
    middle = x[..., lead : tokens - rest, :]
    if whole == 1:
        parts.append(_product(pool, middle))
    elif whole:
        blocks = middle.unflatten(-2, (whole, size))
        parts.append(_product(pool.unsqueeze(-3), blocks).flatten(-3, -2))
    if rest:
        parts.append(_product(pool[..., :rest], x[..., tokens - rest :, :]))
    landmarks = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    after = -(-length // size) - before - landmarks.shape[-2] // rank
    return landmarks if before == after == 0 else F.pad(landmarks, (0, 0, before * rank, after * rank))


def reference(x: Tensor, pool: Tensor, first: int, length: int) -> Tensor:
    """From the formula, with E as a matrix (L, N)."""
    rank, size = pool.shape[-2:]
    count = -(-length // size)
    dtype = accum_dtype(x.dtype)
    whole = pool.new_zeros(*pool.shape[:-2], count * rank, count * size, dtype=dtype)
    for block in range(count):
        whole[..., block * rank : (block + 1) * rank, block * size : (block + 1) * size] = pool
    return torch.matmul(whole[..., first : first + x.shape[-2]], x.to(dtype))


def _product(pool: Tensor, x: Tensor) -> Tensor:
    """(..., r, n) @ (..., n, c), with broadcast batches and sums in float32 or better, without copying x."""
    if accum_dtype(x.dtype) == x.dtype:
        return pool.to(x.dtype) @ x
    return _HalfProduct.apply(pool, x)


class _HalfProduct(torch.autograd.Function):
    """The product of half-precision factors with float32 sums and output.

    A custom function because autograd of `pool.to(x.dtype) @ x` would round the sums and the gradient of E to half
    precision, and `pool @ x.float()` would copy the tokens. Backward computes dE = dy x^T and dx = E^T dy without
    copies. cuBLAS runs these plain matrix products at full speed, so there is no custom kernel.
    """

    @staticmethod
    def forward(ctx: Any, pool: Tensor, x: Tensor) -> Tensor:
        factor = pool.to(x.dtype)
        ctx.save_for_backward(factor, x)
        ctx.dtype = pool.dtype
        return _float32_product(factor, x) if x.is_cuda else _sliced_product(factor, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        factor, x = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        dpool = dx = None
        if ctx.needs_input_grad[0] and ctx.dtype == x.dtype and grad.dim() == 2:
            # If E is in half precision, so is its gradient; Linformer's, of N columns, would be large in float32.
            dpool = grad @ x.mT
        elif ctx.needs_input_grad[0]:
            product = _float32_product(grad, x.mT) if x.is_cuda else _sliced_outer_product(grad, x)
            dpool = product.sum_to_size(factor.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dx = (factor.mT @ grad).sum_to_size(x.shape)
        return dpool, dx


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b on a GPU: cuBLAS takes half-precision factors and returns float32."""
    if a.dim() == b.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, -1, -1).flatten(0, -3) for x in (a, b))
    return torch.bmm(a, b, out_dtype=torch.float32).unflatten(0, batch)


def _sliced_product(factor: Tensor, x: Tensor) -> Tensor:
    """factor @ x on a CPU, which has no mixed-precision product: converts SLICE tokens at a time."""
    out = None
    for columns, tokens in zip(factor.split(SLICE, -1), x.split(SLICE, -2)):
        term = columns.float() @ tokens.float()
        out = term if out is None else out.add_(term)
    assert out is not None
    return out


def _sliced_outer_product(grad: Tensor, x: Tensor) -> Tensor:
    """dy x^T on a CPU, SLICE tokens (columns of the result) at a time."""
    return torch.cat([grad.float() @ tokens.float().mT for tokens in x.split(SLICE, -2)], -1)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
