"""How fast singular values of attention fall (Skyformer, figure 4, of its outputs; FLuRKA, figure 1, of its matrices).

A kernel of F features makes a matrix of rank F at most, and values of width D an output of rank D.
"""

import torch
from torch import Tensor

from .matrices import exact_matrix
from .subject import Subject
from .table import Row


def measure(subject: Subject) -> list[Row]:
    """See `decay`; means over the samples, which are cut to the shortest of them."""
    sums: dict[tuple[int, str], Tensor] = {}
    for _, layer, captured in subject.captured():
        for name, matrix in (("weights", exact_matrix(captured)), ("output", captured.output[0])):
            values = relative_singular_values(matrix)
            before = sums.get((layer, name), torch.zeros_like(values))
            count = min(before.shape[-1], values.shape[-1])
            sums[layer, name] = before[:, :count] + values[:, :count] / len(subject.batches)
    return [row for (layer, name), values in sums.items() for row in decay(layer, name, values)]


def relative_singular_values(matrices: Tensor) -> Tensor:
    """Singular values of (H, N, M) in descending order, as shares of the largest: (H, min(N, M)) float64."""
    values = torch.linalg.svdvals(matrices.double())
    return values / values[:, :1].clamp(min=torch.finfo(values.dtype).tiny)


def decay(layer: int, name: str, values: Tensor) -> list[Row]:
    """Rows of (H, K) relative singular values; what rounding of float64 leaves of a zero is left out."""
    return [
        {"layer": layer, "head": head, "of": name, "index": index, "value": value}
        for head, of_head in enumerate(values.tolist())
        for index, value in enumerate(of_head)
        if value > 1e-15
    ]
