"""The rank of attention matrices over samples and heads (Transformer-MGK, figures 2 and 7; FLuRKA, figure 1)."""

import torch
from torch import Tensor

from .matrices import exact_matrix
from .subject import Subject
from .table import Row

THRESHOLD = 1e-6
"""Singular values up to it count as 0, as in the papers."""


def measure(subject: Subject) -> list[Row]:
    """layer, head, sample, rank, and stable_rank: |A|_F^2 / |A|^2, which small singular values do not move."""
    return [
        {"layer": layer, "head": head, "sample": sample, "rank": int(rank), "stable_rank": stable.item()}
        for sample, layer, captured in subject.captured()
        for head, (rank, stable) in enumerate(zip(*ranks(exact_matrix(captured))))
    ]


def ranks(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Rank (singular values above THRESHOLD) and stable rank of matrices (H, N, N), each (H,)."""
    values = torch.linalg.svdvals(matrices.double())
    largest = values[:, 0].clamp(min=torch.finfo(values.dtype).tiny)
    return (values > THRESHOLD).sum(-1), values.square().sum(-1) / largest.square()
