"""Skyformer's statistical dimension against the definition in numpy, and in cases with known values."""

import numpy as np
import pytest
import torch

from megakernel.analysis.plots.subject import Subject
from megakernel.papers.skyformer.statistical_dimension import (
    EPSILONS,
    dimensions,
    measure_statistical_dimension,
)
from tests.unit.analysis.plots.small_models import small_model

TOKENS, WIDTH = 20, 6


def defined(q, k, epsilon):
    """From the definition: the kernel by a loop, and the trace of a product with an inverse."""
    rows = np.concatenate([q, k])
    kernel = np.array([[np.exp(-((x - y) ** 2).sum() / (2 * WIDTH**0.5)) for y in rows] for x in rows])
    norm = np.sqrt(np.linalg.eigvalsh(kernel[:TOKENS, TOKENS:].T @ kernel[:TOKENS, TOKENS:]).max())
    smoothed = kernel @ np.linalg.inv(kernel + epsilon * norm * np.eye(len(rows)))
    return np.trace(smoothed), 2 * TOKENS * smoothed.diagonal().max()


def test_equals_the_definition():
    q, k = np.random.default_rng(0).normal(size=(2, TOKENS, WIDTH))
    found = dimensions(torch.from_numpy(q), torch.from_numpy(k))
    for epsilon, pair in zip(EPSILONS, found, strict=True):
        # Inverses of matrices of condition 10^4 lose as many digits.
        assert pair == pytest.approx(defined(q, k, epsilon), rel=1e-9)
        assert pair[0] <= pair[1] <= 2 * TOKENS
    assert found[0][0] < found[1][0] < found[2][0] < 2 * TOKENS


def test_equal_tokens_need_one_landmark_and_distant_ones_all():
    one = torch.ones(TOKENS, WIDTH, dtype=torch.float64)
    # One eigenvalue 2N, |C| = N.
    for epsilon, (dimension, uniform) in zip(EPSILONS, dimensions(one, one)):
        assert dimension == pytest.approx(2 / (2 + epsilon), abs=1e-9)
        assert uniform == pytest.approx(dimension, abs=1e-9)
    far = 1e3 * torch.arange(TOKENS, dtype=torch.float64)[:, None].expand(-1, WIDTH)
    # Pairs of a query and its equal key: N eigenvalues 2, |C| = 1.
    for epsilon, (dimension, uniform) in zip(EPSILONS, dimensions(far, far)):
        assert dimension == pytest.approx(TOKENS * 2 / (2 + epsilon))
        assert uniform == pytest.approx(dimension)


def test_rows_of_a_run_have_every_layer_head_sample_and_error():
    from data_pipeline.batch import Batch

    draw = torch.Generator().manual_seed(0)
    batches = []
    for length in (17, 24):
        ids = torch.randint(32, (1, length), generator=draw)
        places = torch.arange(length)[None]
        batches.append(Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool), places))
    model = small_model("kernelized")
    subject = Subject(None, model, batches, torch.device("cpu"), 24)
    rows = measure_statistical_dimension(subject)
    keys = [(row["sample"], row["layer"], row["head"], row["epsilon"]) for row in rows]
    assert sorted(set(keys)) == sorted(keys)
    assert len(keys) == 2 * 2 * 4 * len(EPSILONS)
    assert {(row["sample"], row["tokens"]) for row in rows} == {(0, 17), (1, 24)}
    assert all(0 < row["share"] < 1 for row in rows)
