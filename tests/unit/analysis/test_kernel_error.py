"""Theorem 3 of Learning the Transformer Kernel against errors measured with the feature maps of attention."""

import pytest
import torch
from torch import Tensor

from megakernel.ops.feature_maps import Map, features
from tests.unit.analysis.kernel_error import prf_error, prf_kernel, rks_error, rks_kernel

WIDTH, SAMPLES, DRAWS = 4, 16, 50_000

TOLERANCE = 0.05
"""An error measured on 5e4 draws is itself off by sqrt(kurtosis / 5e4), here at most 2 %."""


def mixture(components: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    means = 0.5 * torch.randn(components, WIDTH, generator=draw, dtype=torch.float64)
    factors = 0.3 * torch.randn(components, WIDTH, WIDTH, generator=draw, dtype=torch.float64)
    return means, factors


def pair(seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, WIDTH, generator=draw, dtype=torch.float64)
    return q / q.norm(), k / k.norm()


def tied(seed: int = 0) -> tuple[Tensor, Tensor]:
    means, factors = mixture(1, seed=seed)
    return torch.cat([means, -means]), factors.repeat(2, 1, 1)


def estimates(name: str, means: Tensor, factors: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """phi(q).phi(k) of many draws, with one draw per head."""
    draw = torch.Generator().manual_seed(2)
    noise = torch.randn(DRAWS, 1, SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
    omega = (noise @ factors + means[:, None]).flatten(1, 2)
    unscaled = torch.stack([q, k]).expand(1, DRAWS, 1, 2, WIDTH) * WIDTH**0.25
    values, log_scale = features(Map(name, components=len(means)), unscaled, omega)
    kernel = (values[..., 0, :] * values[..., 1, :]).sum(-1).flatten()
    return kernel if log_scale is None else kernel * torch.exp(log_scale.sum(-1)).flatten()


MIXTURES = {"theorem 3": tied(), "one": mixture(1), "three untied": mixture(3)}


@pytest.mark.parametrize("mixture_name", MIXTURES)
@pytest.mark.parametrize(
    ("name", "kernel", "error"), [("rks", rks_kernel, rks_error), ("prf", prf_kernel, prf_error)]
)
def test_measured_errors_equal_the_closed_forms(name, kernel, error, mixture_name):
    measured = estimates(name, *MIXTURES[mixture_name], *pair())
    exact = kernel(*MIXTURES[mixture_name], *pair())
    # Unbiased: the mean of the draws is within 5 standard deviations.
    assert abs(measured.mean() - exact) < 5 * measured.std() / DRAWS**0.5
    expected = error(*MIXTURES[mixture_name], *pair(), SAMPLES)
    assert (measured - exact).square().mean().item() == pytest.approx(expected.item(), rel=TOLERANCE)


def test_equation_13_holds_with_s_p_and_not_with_s_transposed_p():
    means, factors = tied()
    q, k = pair()
    [mean, _], [factor, _], p = means, factors, k - q

    def printed(length: Tensor) -> float:
        return (2 / SAMPLES * torch.cos(mean @ p) ** 2 * (1 - torch.exp(-(length**2))) ** 2).item()

    assert rks_error(means, factors, q, k, SAMPLES).item() == pytest.approx(printed((factor @ p).norm()))
    measured = (estimates("rks", means, factors, q, k) - rks_kernel(means, factors, q, k)).square().mean()
    assert measured.item() != pytest.approx(printed((factor.T @ p).norm()), rel=TOLERANCE)


def test_equation_14_holds_with_squared_norms_and_not_as_printed():
    means, factors = mixture(1)
    q, k = pair()
    [mean], [factor], o = means, factors, k + q

    def printed(exponent: Tensor) -> float:
        front = torch.exp(-2 * (q @ q + k @ k - mean @ o)) / SAMPLES
        return (front * (torch.exp(2 * exponent) - torch.exp(exponent))).item()

    expected = prf_error(means, factors, q, k, SAMPLES).item()
    assert expected == pytest.approx(printed((factor @ o).norm() ** 2))
    measured = (estimates("prf", means, factors, q, k) - prf_kernel(means, factors, q, k)).square().mean()
    assert measured.item() != pytest.approx(printed((factor.T @ o).norm()), rel=TOLERANCE)


def test_smaller_covariance_means_smaller_error():
    """The consequence of the theorem: a learned kernel can lower its own variance."""
    q, k = pair()
    for means, factors in MIXTURES.values():
        for error in (rks_error, prf_error):
            errors = [error(means, scale * factors, q, k, SAMPLES).item() for scale in (1.0, 0.5, 0.1)]
            assert errors == sorted(errors, reverse=True)


def test_the_tied_rks_error_never_exceeds_two_over_m():
    draw = torch.Generator().manual_seed(3)
    q, k = 3 * torch.randn(2, 100, WIDTH, generator=draw, dtype=torch.float64)
    means, factors = tied()
    assert rks_error(means, factors, q, k, SAMPLES).max() <= 2 / SAMPLES
