"""Queries, keys and values that are columns of one tensor, and gradients that are columns of one, too.

torch joins the gradients of a tensor's parts by a copy of all of them. Kernels that write the gradients of queries,
keys and values side by side leave nothing to copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split_heads(x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    """`split_columns` of whole heads: x (..., heads, d), `counts` of the heads; without a gradient one operation."""
    if not _differentiates(x):
        return x.split(tuple(counts), -2)
    width = x.shape[-1]
    parts = split_columns(x.flatten(-2), [count * width for count in counts])
    return [part.unflatten(-1, (-1, width)) for part in parts]


def split_columns(x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """`x.split(widths, -1)` whose backward does not copy gradients that are columns of one tensor."""
    if not _differentiates(x):
        return x.split(tuple(widths), -1)
    parts: tuple[Tensor, ...] = _Split.apply(x, tuple(widths))
    return parts


def _differentiates(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        return x.split(widths, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A gradient that is differentiated again needs an operation on all parts.
        whole = None if torch.is_grad_enabled() else joined(grads)
        return torch.cat(grads, -1) if whole is None else whole, None


def joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor (..., sum of widths) whose columns are the parts (..., width) in this order; None if there is none."""
    first = parts[0]
    start, storage = first.storage_offset(), first.untyped_storage()._cdata
    end = start
    for part in parts:
        alike = part.dtype == first.dtype and part.shape[:-1] == first.shape[:-1]
        if not (alike and part.stride() == first.stride() and part.storage_offset() == end):
            return None
        if part.stride(-1) != 1 or part.untyped_storage()._cdata != storage:
            return None
        end += part.shape[-1]
    return first.as_strided((*first.shape[:-1], end - start), first.stride(), start)


def gradient_buffers(*tensors: Tensor) -> Sequence[Tensor]:
    """Buffers for the gradients of tensors: columns of one tensor if the tensors are, otherwise each contiguous."""
    whole = joined(tensors)
    if whole is None:
        return [x.new_empty(x.shape) for x in tensors]
    return torch.empty_like(whole).split([x.shape[-1] for x in tensors], -1)
