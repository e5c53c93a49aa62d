"""Skyformer's statistical dimension (its theorem 2): how many landmarks an approximation of the attention matrix needs.

C = kappa(Q, K) is the matrix of kernelized attention of a run's own queries and keys, whatever mechanism the run has,
and C' = kappa(X, X) its completion for the 2N rows X = [Q; K], which is positive semidefinite. With lambda = eps |C|,
spectral norm, and leverage scores l, the diagonal of C' (C' + lambda I)^-1 (docs/formulas.md, 5),

    dimension = sum_i l_i        uniform = 2N max_i l_i

Up to a constant and a logarithm, `dimension` landmarks suffice for an error of eps |C| if they are drawn by leverage,
and `uniform` if they are drawn uniformly, as Skyformer's are: it is d_stat / beta of the theorem.
"""

import torch
from torch import Tensor

from megakernel.analysis.plots.subject import Subject
from megakernel.analysis.plots.table import Row
from megakernel.papers.skyformer.measurements import rotated
from megakernel.papers.skyformer.skyformer_attention import gaussian

EPSILONS = (0.1, 0.01, 0.001)
"""Errors relative to |C|."""


def measure_statistical_dimension(subject: Subject) -> list[Row]:
    """layer, head, sample, tokens (N), epsilon, dimension, uniform, and share: dimension / 2N.

    Layers without a separate key per token, and those that do not use their keys, have no rows.
    """
    rows: list[Row] = []
    for sample, layer, captured in subject.captured():
        core = captured.core
        if core.compresses_input or core.keys_per_head != 1 or core.spec.keys_are_queries:
            continue
        q, k, _ = rotated(captured)
        tokens = q.shape[2]
        for head, (queries, keys) in enumerate(zip(q[0], k[0])):
            for epsilon, (dimension, uniform) in zip(EPSILONS, dimensions(queries, keys)):
                rows.append(
                    {
                        **{"layer": layer, "head": head, "sample": sample, "tokens": tokens},
                        **{"epsilon": epsilon, "dimension": dimension, "uniform": uniform},
                        "share": dimension / (2 * tokens),
                    }
                )
    return rows


@torch.no_grad()
def dimensions(q: Tensor, k: Tensor) -> list[tuple[float, float]]:
    """(d_stat, 2N max leverage) for each of EPSILONS; q, k: (N, d) float64 of one head."""
    rows = torch.cat([q, k])
    completed = gaussian(rows, rows)
    norm = torch.linalg.matrix_norm(completed[: len(q), len(q) :], ord=2)
    eigenvalues, vectors = torch.linalg.eigh(completed)
    found = []
    for epsilon in EPSILONS:
        # Rounding leaves eigenvalues slightly below 0.
        shares = eigenvalues.clamp(min=0) / (eigenvalues.clamp(min=0) + epsilon * norm)
        leverage = vectors.square() @ shares
        found.append((shares.sum().item(), len(rows) * leverage.max().item()))
    return found
