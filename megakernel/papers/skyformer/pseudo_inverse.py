"""Inverses of small matrices by matrix products alone, which suits accelerators (docs/formulas.md, 5)."""

from collections.abc import Callable

import torch
from torch import Tensor

Invert = Callable[[Tensor], Tensor]
"""(..., m, m) -> its inverse."""

STEPS = 6
"""Iterations in the papers. By design, they do not suffice to invert an ill-conditioned matrix."""


def iterative_inverse(matrix: Tensor, scale: Tensor) -> Tensor:
    """V <- V (13 I - KV (15 I - KV (7 I - KV))) / 4, from V = K^T / scale; K is (..., m, m).

    Third order: each step cubes the error I - KV, times a factor. It converges if |I - KV| < 1 at the start, which
    `scale` (..., 1, 1) must ensure.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = matrix.transpose(-1, -2) / scale
    for _ in range(STEPS):
        product = matrix @ inverse
        inner = 15 * identity - product @ (7 * identity - product)
        inverse = inverse @ (13 * identity - product @ inner) / 4
    return inverse


def largest_column_sum(matrix: Tensor) -> Tensor:
    """(..., 1, 1), for matrices without negative entries."""
    return matrix.sum(-2, keepdim=True).amax(-1, keepdim=True)


def normalized_gram(gram: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """D^-1/2 (M + gamma I) D^-1/2 with D = diag((M + gamma I) 1), and the diagonal of D^-1/2 as (..., m).

    M is positive semidefinite, without negative entries; the singular values of the result are in (0, 1] (Skyformer,
    lemma 3).
    """
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    lifted = gram + gamma * identity
    root = lifted.sum(-1).rsqrt()
    return lifted * root[..., None] * root[..., None, :], root


def regularized_inverse(gram: Tensor, gamma: float = 0.1) -> Tensor:
    """(M + gamma I)^-1 by the iteration, with a separate scale per matrix."""
    matrix, root = normalized_gram(gram, gamma)
    return iterative_inverse(matrix, largest_column_sum(matrix)) * root[..., None] * root[..., None, :]


def softmax_inverse(matrix: Tensor) -> Tensor:
    """The inverse of a softmax matrix by the iteration, with a separate scale per matrix (Nyströmformer, eq. 14)."""
    rows = matrix.sum(-1, keepdim=True).amax(-2, keepdim=True)
    return iterative_inverse(matrix, largest_column_sum(matrix) * rows)


def exact_inverse(gram: Tensor) -> Tensor:
    """M^+, for measurements; its gradient is useless if M is singular."""
    return torch.linalg.pinv(gram, hermitian=True)
