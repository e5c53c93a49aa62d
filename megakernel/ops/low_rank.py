"""Low rank along the sequence: tokens become landmarks, E x (docs/formulas.md, 3)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype, choose

SLICE = 4096
"""Tokens that a CPU converts to float32 at once."""


def compress(
    x: Tensor, pool: Tensor, *, first: int = 0, length: int | None = None, backend: str | None = None
) -> Tensor:
    """The part of E x that tokens `first` .. `first` + n - 1 of sequences of `length` tokens contribute.

    Every block of b tokens has r landmarks, each a weighted sum of the block's tokens. `block` compression has
    short blocks; Linformer is one block as long as the longest sequence, of which shorter sequences use the first
    columns. The parts of consecutive stretches of a sequence add up to the whole, wherever it is cut.

    Args:
        x: (..., n, c) tokens; (..., H, n, c) for pools per head.
        pool: E, (r, b) or (H, r, b).
        first: place of the first token in its sequence.
        length: tokens of the whole sequence; None: these are all.
        backend: reference or chunked.

    Returns:
        (..., L, c) with L = r ceil(length / b), in float32 or better: what parts add up to is rounded once, by
        whoever rounds the sum. Where x is in half precision, so are the factors of E x, but not its sums.

    Raises:
        ValueError: a stretch that does not lie in its sequence.
    """
    length = x.shape[-2] if length is None else length
    if first < 0 or first + x.shape[-2] > length:
        raise ValueError(
            f"first={first}: {x.shape[-2]} tokens from there do not lie in a sequence of length={length}; change one"
        )
    return choose(IMPLEMENTATIONS, backend)(x, pool, first, length)


def chunked(x: Tensor, pool: Tensor, first: int, length: int) -> Tensor:
    """Matrix products over blocks, without the zeros of E and without copies of x."""
    rank, size = pool.shape[-2:]
    tokens = x.shape[-2]
    before, inside = divmod(first, size)
    # The end of a block that began in another shard, whole blocks, and the beginning of one that goes on in the next.
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
    """E as the matrix it is, (L, N)."""
    rank, size = pool.shape[-2:]
    count = -(-length // size)
    dtype = accum_dtype(x.dtype)
    whole = pool.new_zeros(*pool.shape[:-2], count * rank, count * size, dtype=dtype)
    for block in range(count):
        whole[..., block * rank : (block + 1) * rank, block * size : (block + 1) * size] = pool
    return torch.matmul(whole[..., first : first + x.shape[-2]], x.to(dtype))


def _product(pool: Tensor, x: Tensor) -> Tensor:
    """(..., r, n) times (..., n, c), batches broadcast, tokens as they lie in memory, summed in float32 or better."""
    if accum_dtype(x.dtype) == x.dtype:
        return pool.to(x.dtype) @ x
    return _HalfProduct.apply(pool, x)


class _HalfProduct(torch.autograd.Function):
    """The product of factors in half precision, whose sums over tokens are float32 and leave it as such.

    It is a matrix product and nothing else, which cuBLAS does as fast as the chip can: no kernel of ours stands here.
    What autograd would make of `pool.to(x.dtype) @ x` rounds the sums and the gradient of E to half precision, and of
    `pool @ x.float()` copies the tokens. Backward, dE = dy x^T and dx = E^T dy read E and x where they lie, too.
    """

    @staticmethod
    def forward(ctx: Any, pool: Tensor, x: Tensor) -> Tensor:
        factor = pool.to(x.dtype)
        ctx.save_for_backward(factor, x)
        ctx.dtype = pool.dtype
        return _float32_product(factor, x) if x.is_cuda else _sum_of_slices(factor, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        factor, x = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        of_pool = of_x = None
        if ctx.needs_input_grad[0] and ctx.dtype == x.dtype and grad.dim() == 2:
            # An E in half precision takes no more digits, and one of N columns is large.
            of_pool = grad @ x.mT
        elif ctx.needs_input_grad[0]:
            slopes = _float32_product(grad, x.mT) if x.is_cuda else _row_of_slices(grad, x)
            of_pool = slopes.sum_to_size(factor.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_x = (factor.mT @ grad).sum_to_size(x.shape)
        return of_pool, of_x


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a b on a GPU, whose library takes half-precision factors and gives float32."""
    if a.dim() == b.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, -1, -1).flatten(0, -3) for x in (a, b))
    return torch.bmm(a, b, out_dtype=torch.float32).unflatten(0, batch)


def _sum_of_slices(factor: Tensor, x: Tensor) -> Tensor:
    """The same on a CPU, which has no such product: a slice of the tokens is converted, added, and gone."""
    slices = zip(factor.split(SLICE, -1), x.split(SLICE, -2))
    out = None
    for columns, tokens in slices:
        term = columns.float() @ tokens.float()
        out = term if out is None else out.add_(term)
    assert out is not None
    return out


def _row_of_slices(grad: Tensor, x: Tensor) -> Tensor:
    """dy x^T likewise, whose columns are tokens."""
    return torch.cat([grad.float() @ tokens.float().mT for tokens in x.split(SLICE, -2)], -1)


IMPLEMENTATIONS = {"chunked": chunked, "reference": reference}
"""Backend -> implementation."""
