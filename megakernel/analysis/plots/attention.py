"""Attention matrices as images (Transformer-MGK, figures 2, 6 and 9): one sample, all layers and heads."""

from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from .matrices import attention_matrix
from .subject import Subject
from .table import Row

CELLS = 64
"""Cells of an image along each side; longer rows have several tokens to a cell."""


def measure(subject: Subject) -> list[Row]:
    """The weights of the first sample: see `image`."""
    of_first = takewhile(lambda found: found[0] == 0, subject.captured())
    return [row for _, layer, captured in of_first for row in image(layer, attention_matrix(captured))]


def image(layer: int, weights: Tensor) -> list[Row]:
    """The rows of weights (H, N, N): at most CELLS x CELLS cells for each head; cells without weight are left out.

    query, key: the first token of a cell. weight: what a query of the cell lays on all its keys, on average.
    """
    size = -(-weights.shape[-1] // CELLS)
    pad = -weights.shape[-1] % size
    sums = F.pad(weights, (0, pad)).unflatten(-1, (-1, size)).sum(-1)
    starts = torch.arange(0, weights.shape[1], size, device=weights.device)
    means = torch.stack([sums[:, start : start + size].mean(1) for start in starts.tolist()], 1)
    return [
        {"layer": layer, "head": head, "query": size * query, "key": size * key, "weight": weight}
        for head, matrix in enumerate(means.tolist())
        for query, cells_of_query in enumerate(matrix)
        for key, weight in enumerate(cells_of_query)
        if weight
    ]
