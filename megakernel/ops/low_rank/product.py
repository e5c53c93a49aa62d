"""The product E x of few rows and many tokens: tokens as they lie in memory, sums in float32."""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype

SLICE = 4096
"""Tokens that a CPU widens at once."""


def product(pool: Tensor, x: Tensor) -> Tensor:
    """(..., r, n) times (..., n, c), batches broadcast, in float32 or better."""
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
        return _wide_product(factor, x) if x.is_cuda else _sum_of_slices(factor, x)

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor | None, Tensor | None]:
        factor, x = ctx.saved_tensors
        pull = pulls[0].to(x.dtype)
        of_pool = of_x = None
        if ctx.needs_input_grad[0] and ctx.dtype == x.dtype and pull.dim() == 2:
            of_pool = (
                pull @ x.mT
            )  # an E in half precision takes no more digits, and one of N columns is large
        elif ctx.needs_input_grad[0]:
            slopes = _wide_product(pull, x.mT) if x.is_cuda else _row_of_slices(pull, x)
            of_pool = slopes.sum_to_size(factor.shape).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_x = (factor.mT @ pull).sum_to_size(x.shape)
        return of_pool, of_x


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b on a GPU, whose library takes half-precision factors and gives float32."""
    if a.dim() == b.dim() == 2:
        return torch.mm(a, b, out_dtype=torch.float32)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, -1, -1).flatten(0, -3) for x in (a, b))
    return torch.bmm(a, b, out_dtype=torch.float32).unflatten(0, batch)


def _sum_of_slices(factor: Tensor, x: Tensor) -> Tensor:
    """The same on a CPU, which has no such product: a slice of the tokens is widened, added, and gone."""
    slices = zip(factor.split(SLICE, -1), x.split(SLICE, -2))
    out = None
    for columns, tokens in slices:
        term = columns.float() @ tokens.float()
        out = term if out is None else out.add_(term)
    assert out is not None
    return out


def _row_of_slices(pull: Tensor, x: Tensor) -> Tensor:
    """pull x^T likewise, whose columns are tokens."""
    return torch.cat([pull.float() @ tokens.float().mT for tokens in x.split(SLICE, -2)], -1)
