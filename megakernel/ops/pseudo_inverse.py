"""Inverses of small matrices by matrix products alone, which accelerators are good at (docs/formulas.md, 5)."""

from collections.abc import Callable

import torch
from torch import Tensor

Invert = Callable[[Tensor], Tensor]
"""(..., m, m) -> its inverse."""

STEPS = 6
"""Iterations of the papers. An ill-conditioned matrix is far from inverted after them, by design."""


def iterative_inverse(matrix: Tensor, scale: Tensor, steps: int = STEPS) -> Tensor:
    """V <- V (13 I - KV (15 I - KV (7 I - KV))) / 4, from V = K^T / scale; K is (..., m, m).

    Third order: the error I - KV goes to its cube times a factor. It converges where |I - KV| < 1 at the start, which
    `scale` (..., 1, 1) has to give.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = matrix.transpose(-1, -2) / scale
    for _ in range(steps):
        product = matrix @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ inner) / 4
    return inverse


def largest_column_sum(matrix: Tensor) -> Tensor:
    """(..., 1, 1) of a matrix without negative numbers."""
    return matrix.sum(-2, keepdim=True).amax(-1, keepdim=True)


def normalized_gram(gram: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """D^-1/2 (M + gamma I) D^-1/2 with D = diag((M + gamma I) 1), and the diagonal of D^-1/2 as (..., m).

    Of a positive semidefinite M without negative numbers; the singular values of the result lie in (0, 1] (Skyformer,
    lemma 3).
    """
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lifted = gram + gamma * identity
    root = lifted.sum(-1).rsqrt()
    return lifted * root[..., None] * root[..., None, :], root


def regularized_inverse(gram: Tensor, gamma: float = 0.1) -> Tensor:
    """(M + gamma I)^-1 by the iteration, each matrix from a start of its own."""
    matrix, root = normalized_gram(gram, gamma)
    return iterative_inverse(matrix, largest_column_sum(matrix)) * root[..., None] * root[..., None, :]


def softmax_inverse(matrix: Tensor) -> Tensor:
    """The inverse of a softmax matrix by the iteration, each matrix from a start of its own (Nyströmformer, eq. 14)."""
    rows = matrix.sum(-1, keepdim=True).amax(-2, keepdim=True)
    return iterative_inverse(matrix, largest_column_sum(matrix) * rows)


def exact_inverse(gram: Tensor) -> Tensor:
    """M^+, for measurements; without a useful gradient where M is singular."""
    return torch.linalg.pinv(gram, hermitian=True)
