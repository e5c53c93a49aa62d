"""Singular values and ranks of attention matrices and outputs, and eigenvalues of learned covariances.

`singular_values`: their decay (Skyformer, figure 4, of outputs; FLuRKA, figure 1, of matrices). A kernel of F features
gives a matrix of rank at most F, and values of width D an output of rank at most D. `ranks`: over samples and heads
(Transformer-MGK, figures 2 and 7; FLuRKA, figure 1). `covariances`: of spectral mixtures (KL, tables 4, 9 to 12);
eigenvalues below 1 reduce variance.
"""

import math

import torch
from torch import Tensor, nn

from megakernel.attention.map_parameters import GaussianMixture
from megakernel.model.layer import attention_cores

from .matrices import exact_matrix
from .subject import Subject
from .table import Row


def measure_singular_values(subject: Subject) -> list[Row]:
    """The rows of `singular_value_rows` for means over the samples, truncated to the shortest."""
    sums: dict[tuple[int, str], Tensor] = {}
    for _, layer, captured in subject.captured():
        for name, matrix in (("weights", exact_matrix(captured)), ("output", captured.output[0])):
            values = relative_singular_values(matrix)
            before = sums.get((layer, name), torch.zeros_like(values))
            count = min(before.shape[-1], values.shape[-1])
            sums[layer, name] = before[:, :count] + values[:, :count] / len(subject.batches)
    return [row for (layer, name), values in sums.items() for row in singular_value_rows(layer, name, values)]


def relative_singular_values(matrices: Tensor) -> Tensor:
    """Singular values of (H, N, M) in descending order, as shares of the largest: (H, min(N, M)) float64."""
    values = torch.linalg.svdvals(matrices.double())
    return values / values[:, :1].clamp(min=torch.finfo(values.dtype).tiny)


def singular_value_rows(layer: int, name: str, values: Tensor) -> list[Row]:
    """Rows for relative singular values (H, K), without those that are zeros up to float64 rounding."""
    return [
        {"layer": layer, "head": head, "of": name, "index": index, "value": value}
        for head, of_head in enumerate(values.tolist())
        for index, value in enumerate(of_head)
        if value > 1e-15
    ]


THRESHOLD = 1e-6
"""Singular values up to this count as 0, as in the papers."""


def measure_ranks(subject: Subject) -> list[Row]:
    """layer, head, sample, rank, and stable_rank: |A|_F^2 / |A|^2, which is insensitive to small singular values."""
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


def measure_covariances(subject: Subject) -> list[Row]:
    """The rows of `eigenvalue_rows`."""
    return eigenvalue_rows(subject.model)


def eigenvalue_rows(model: nn.Module) -> list[Row]:
    """layer, head (of the keys), component, index and finite eigenvalue (descending) of this rank's layers."""
    return [
        {"layer": layer, "head": head, "component": component, "index": index, "eigenvalue": value}
        for layer, core in attention_cores(model).items()
        for mixture in core.modules()
        if isinstance(mixture, GaussianMixture)
        for head, components in enumerate(eigenvalues(mixture).tolist())
        for component, of_component in enumerate(components)
        for index, value in enumerate(of_component)
        if math.isfinite(value)
    ]


@torch.no_grad()
def eigenvalues(mixture: GaussianMixture) -> Tensor:
    """Eigenvalues of the covariances S^T S, or the variances of diagonal ones: (H_kv, C, d) float64, descending."""
    if mixture.full:
        factor = mixture.factor.double()
        is_finite = factor.isfinite().flatten(-2).all(-1, keepdim=True)
        # The decomposition raises an error for numbers that are not finite.
        return torch.linalg.svdvals(factor.nan_to_num()).square().where(is_finite, torch.nan)
    return mixture.log_variance.double().exp().sort(-1, descending=True).values
