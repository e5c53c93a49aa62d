"""The rank of attention matrices over samples and heads (Transformer-MGK, figures 2 and 7; FLuRKA, figure 1)."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from .drawing import distributions
from .matrices import exact_matrix
from .subject import Subject
from .table import Row

THRESHOLD = 1e-6
"""Singular values up to it count as 0, as in the papers."""


def measure(subject: Subject) -> list[Row]:
    """layer, head, sample, rank, and stable_rank: |A|_F^2 / |A|^2, which small singular values do not move."""
    rows: list[Row] = []
    for sample, layers in enumerate(subject.captured()):
        for layer, captured in layers.items():
            rank, stable = ranks(exact_matrix(captured))
            rows += [
                {"layer": layer, "head": head, "sample": sample, "rank": whole, "stable_rank": smooth}
                for head, (whole, smooth) in enumerate(zip(rank.tolist(), stable.tolist()))
            ]
    return rows


def draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    """Distributions over samples and heads, a line for each layer."""
    return {
        "rank": distributions(rows, "rank", "layer"),
        "stable_rank": distributions(rows, "stable_rank", "layer"),
    }


def ranks(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Of (H, N, N): singular values above THRESHOLD (H,), and the stable rank (H,)."""
    values = torch.linalg.svdvals(matrices.double())
    largest = values[:, 0].clamp(min=torch.finfo(values.dtype).tiny)
    return (values > THRESHOLD).sum(-1), values.square().sum(-1) / largest.square()
