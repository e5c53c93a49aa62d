from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megakernel.ops.weighted_attention import weighted_attention
from megakernel.papers.skyformer import pseudo_inverse
from megakernel.papers.skyformer.pseudo_inverse import (
    exact_inverse,
    iterative_inverse,
    largest_column_sum,
    normalized_gram,
    regularized_inverse,
    softmax_inverse,
)
from megakernel.papers.skyformer.skyformer_attention import skyformer_attention


def gaussian_gram(count: int, width: int, scale: float, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, width, generator=draw, dtype=torch.float64)
    return torch.exp(-(x[:, None] - x).square().sum(-1) / (2 * width**0.5))


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("repeated", [False, True])
def test_singular_values_of_the_normalized_matrix_lie_between_0_and_1(scale, repeated):
    """Skyformer, lemma 3. The largest is exactly 1, with the vector D^1/2 1, so the interval is open only at 0."""
    gram = gaussian_gram(64, 8, scale, seed=0)
    if repeated:  # like landmarks sampled with replacement
        rows = torch.arange(64) // 2
        gram = gram[rows][:, rows]
    matrix, _ = normalized_gram(gram, 0.1)
    values = torch.linalg.svdvals(matrix)
    assert values.min() > 0
    torch.testing.assert_close(values.max(), torch.ones((), dtype=torch.float64))
    # The condition of convergence (Razavi, theorem 2), except for the eigenvalue 1.
    identity = torch.eye(64, dtype=torch.float64)
    assert torch.linalg.matrix_norm(identity - matrix, 2) < 1


def inverse_after(steps: int, matrix: Tensor, monkeypatch) -> Tensor:
    monkeypatch.setattr(pseudo_inverse, "STEPS", steps)
    return iterative_inverse(matrix, largest_column_sum(matrix))


def test_enough_steps_reach_the_inverse(monkeypatch):
    matrix, _ = normalized_gram(gaussian_gram(32, 8, 1.0, seed=0), 0.1)
    found = inverse_after(12, matrix, monkeypatch)
    torch.testing.assert_close(found, torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)


def test_every_step_reduces_the_error(monkeypatch):
    matrix, _ = normalized_gram(gaussian_gram(32, 8, 1.0, seed=0), 0.1)
    expected = torch.linalg.inv(matrix)
    errors = [(inverse_after(steps, matrix, monkeypatch) - expected).norm() for steps in range(10)]
    assert all(later < earlier for earlier, later in pairwise(errors)), errors


def test_each_matrix_is_inverted_with_its_own_scale():
    one, two = (gaussian_gram(16, 8, scale, seed=1) for scale in (0.5, 3.0))
    for invert in (regularized_inverse, softmax_inverse):
        together = invert(
            torch.stack([one, two]).softmax(-1) if invert is softmax_inverse else torch.stack([one, two])
        )
        alone = invert(one.softmax(-1) if invert is softmax_inverse else one)
        torch.testing.assert_close(together[0], alone)


def spectral_errors(length: int, counts: tuple[int, ...], invert, trials: int = 4) -> list[float]:
    """||C V - C~ V|| / ||C V|| with uniformly sampled landmarks, averaged over trials, for each count of landmarks."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 8, generator=draw, dtype=torch.float64) for _ in range(3))
    exact = weighted_attention(q, k, v, normalize=False, causal=False)[0][0, 0]
    errors = []
    for count in counts:
        total = 0.0
        for _ in range(trials):
            rows = torch.randint(2 * length, (count,), generator=draw)
            out = skyformer_attention(q, k, v, landmarks=rows, invert=invert)[0, 0]
            total += float(torch.linalg.matrix_norm(out - exact, 2) / torch.linalg.matrix_norm(exact, 2))
        errors.append(total / trials)
    return errors


@pytest.mark.parametrize("length", [256, 512])
def test_the_spectral_error_falls_with_the_number_of_features(length):
    """Skyformer, figure 1: 2^4 to 2^8 features, with the exact inverse of eq. 5."""
    errors = spectral_errors(length, (16, 32, 64, 128, 256), exact_inverse)
    assert all(later < earlier for earlier, later in pairwise(errors)), errors
    # Averages over 16 times as many random samples would have a quarter of the error.
    assert errors[-1] < errors[0] / 4, errors


def test_the_regularized_iteration_costs_accuracy_and_still_gains_by_features():
    errors = spectral_errors(512, (16, 64, 256), regularized_inverse)
    assert errors[0] > errors[1] > errors[2], errors
    assert errors[2] > spectral_errors(512, (256,), exact_inverse)[0]
