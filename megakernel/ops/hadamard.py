"""The Walsh-Hadamard transform: products with a matrix of entries +-1, by additions alone."""

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """H x along the last dimension, n a power of two, in n log2 n additions.

    H is Sylvester's matrix, H_1 = 1, H_2n = [[H_n, H_n], [H_n, -H_n]], unnormalized: H H = n I, and H is
    symmetric, so it is its own gradient.
    """
    return _Hadamard.apply(x)


def hadamard_matrix(size: int, like: Tensor) -> Tensor:
    """H as a matrix (n, n), from its recursion, for comparison."""
    matrix = like.new_ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


class _Hadamard(torch.autograd.Function):
    """Sums and differences of entries at distance 1, 2, 4, ...; backward needs no saved tensors."""

    @staticmethod
    def forward(ctx, x):
        size = x.shape[-1]
        assert size & (size - 1) == 0, size
        step = 1
        while step < size:
            first, second = x.unflatten(-1, (-1, 2, step)).unbind(-2)
            x = torch.stack([first + second, first - second], -2).flatten(-3)
            step *= 2
        return x.clone() if size == 1 else x

    @staticmethod
    def backward(ctx, grad):
        return hadamard(grad)
