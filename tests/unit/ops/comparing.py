"""Comparing two backends of an op: outputs, states and gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megakernel.ops.softmax_attention import softmax_attention

PACKED = torch.stack(
    [
        torch.cat([torch.arange(3), torch.arange(12), torch.arange(8)]),
        torch.cat([torch.arange(9), torch.arange(1), torch.arange(13)]),
    ]
)
"""Positions of two sequences of 23 tokens, with three documents each."""


def random(*shape: int, seed: int = 0) -> Tensor:
    """A leaf tensor of standard normal float64 numbers."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()


def assert_same(
    run: Callable[[str], Sequence[Tensor]], leaves: Sequence[Tensor], tolerance: float = 1e-9
) -> None:
    """`run("chunked")` and `run("reference")` give the same tensors and the same gradients of `leaves`."""
    results, slopes = [], []
    for backend in ("chunked", "reference"):
        outputs = run(backend)
        draw = torch.Generator().manual_seed(1)
        total = sum((x * torch.randn(x.shape, generator=draw, dtype=torch.float64)).sum() for x in outputs)
        results.append(outputs)
        slopes.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    for fast, plain in zip((*results[0], *slopes[0]), (*results[1], *slopes[1])):
        # Sums of float64 in another order; the weights of a random sum can reach hundreds.
        torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)


def softmax_reference(tensors: Sequence[Tensor], **options) -> tuple[Tensor, ...]:
    """Output and gradients of the reference of softmax attention; tensors: q, k, v and a weight of every output."""
    *leaves, weight = tensors
    out, _ = softmax_attention(*leaves, **options, backend="reference")
    return out, *torch.autograd.grad((out * weight).sum(), leaves)
