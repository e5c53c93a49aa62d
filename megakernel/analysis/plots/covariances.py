"""Eigenvalues of the learned covariances of spectral mixtures (KL, tables 4, 9 to 12): below 1 they reduce variance."""

import torch
from torch import Tensor, nn

from megakernel.attention.features import GaussianMixture
from megakernel.model.layer import attention_cores

from .subject import Subject
from .table import Row


def measure(subject: Subject) -> list[Row]:
    """The rows of `eigenvalue_rows`."""
    return eigenvalue_rows(subject.model)


def eigenvalue_rows(model: nn.Module) -> list[Row]:
    """layer, head (of the keys), component, index and eigenvalue, in descending order, of this rank's layers."""
    return [
        {"layer": layer, "head": head, "component": component, "index": index, "eigenvalue": value}
        for layer, core in attention_cores(model).items()
        for mixture in core.modules()
        if isinstance(mixture, GaussianMixture)
        for head, components in enumerate(eigenvalues(mixture).tolist())
        for component, of_component in enumerate(components)
        for index, value in enumerate(of_component)
    ]


@torch.no_grad()
def eigenvalues(mixture: GaussianMixture) -> Tensor:
    """Eigenvalues of the covariances S^T S, or the variances of diagonal ones: (H_kv, C, d) float64, descending."""
    if mixture.full:
        return torch.linalg.svdvals(mixture.factor.double()).square()
    return mixture.log_variance.double().exp().sort(-1, descending=True).values
