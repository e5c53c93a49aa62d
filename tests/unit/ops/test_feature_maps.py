import math

import pytest
import torch

from megakernel.ops.feature_maps import FEATURE_MAPS, Map, features
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.projections import FastFood, dense

from .comparing import assert_same, random


def phi(name, x, projection=None):
    values, log_scale = features(name, x[None, None, None], projection)
    return (values if log_scale is None else values * torch.exp(log_scale)[..., None])[0, 0, 0]


def test_elu_never_cancels_to_zero():
    x = torch.tensor([[-30.0, -10.0, -1.0, 0.0, 2.0]])
    expected = torch.tensor([[math.exp(-30), math.exp(-10), math.exp(-1), 1.0, 3.0]])
    torch.testing.assert_close(phi("elu", x), expected)


def test_elu_has_slope_one_at_zero():
    x = torch.zeros(1, 1, requires_grad=True)
    assert torch.autograd.grad(phi("elu", x).sum(), x)[0].item() == 1.0


def test_favor_is_positive_and_does_not_overflow():
    values, log_scale = features("favor", 100 * torch.ones(1, 1, 1, 1, 4), torch.eye(4))
    assert log_scale is not None
    assert values.isfinite().all()
    assert values.max() == 0.5
    # omega.x - |x|^2 / 2 with x scaled by d^-1/4.
    scaled = 100 / 4**0.25
    torch.testing.assert_close(log_scale.item(), scaled - 2 * scaled**2, rtol=1e-6, atol=0)


def test_hedgehog_halves_are_softmaxes_of_both_signs():
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    out = phi("hedgehog", x, weight)
    torch.testing.assert_close(out[:, :4], (x @ weight.T).softmax(-1))
    torch.testing.assert_close(out[:, 4:], (-x @ weight.T).softmax(-1))


@pytest.mark.parametrize(
    "name", [name for name, feature_map in FEATURE_MAPS.items() if feature_map.projected]
)
def test_each_key_head_has_its_own_projection(name):
    x, weight = torch.randn(1, 3, 2, 5, 4), torch.randn(3, 4, 4)
    together = features(name, x, weight)
    for head in range(3):
        alone = features(name, x[:, head : head + 1], weight[head])
        torch.testing.assert_close(together.values[:, head : head + 1], alone.values)


def test_prf_subtracts_the_squared_norm_and_favor_half_of_it():
    x, omega = torch.randn(3, 4), torch.randn(5, 4)
    scaled = x / 4**0.25
    square = scaled.square().sum(-1, keepdim=True)
    torch.testing.assert_close(phi("favor", x, omega), torch.exp(scaled @ omega.T - square / 2) / 5**0.5)
    torch.testing.assert_close(phi("prf", x, omega), torch.exp(scaled @ omega.T - square) / 5**0.5)


def test_rks_estimates_a_shift_invariant_kernel():
    q, k, shift, omega = (torch.randn(n, 4, dtype=torch.float64) for n in (3, 3, 1, 50))
    here = (phi("rks", q, omega) * phi("rks", k, omega)).sum(-1)
    there = (phi("rks", q + shift, omega) * phi("rks", k + shift, omega)).sum(-1)
    torch.testing.assert_close(here, there)
    torch.testing.assert_close((phi("rks", q, omega) ** 2).sum(-1), torch.ones(3, dtype=torch.float64))


def test_components_are_added_and_not_averaged():
    x, first, second = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 4)
    for name in ("rks", "prf"):
        alone = sum(phi(name, x, omega) @ phi(name, x, omega).T for omega in (first, second))
        both = phi(Map(name, components=2), x, torch.cat([first, second]))
        torch.testing.assert_close(both @ both.T, alone)


@pytest.mark.parametrize("name", ["elu", "hedgehog", "favor", "rks", "prf"])
@pytest.mark.parametrize("smoothing", [0.5, 30.0])
def test_smoothing_adds_a_constant_to_the_kernel(name, smoothing):
    x, weight = 3 * torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    projection = weight if FEATURE_MAPS[name].projected else None
    plain, smooth = phi(name, x, projection), phi(Map(name, smoothing=smoothing), x, projection)
    torch.testing.assert_close(smooth @ smooth.T, plain @ plain.T + smoothing**2)


def test_smoothed_positive_features_stay_finite_where_the_kernel_vanishes():
    values, log_scale = features(Map("prf", smoothing=1.0), 1e3 * torch.ones(1, 1, 1, 1, 4), torch.eye(4))
    assert values.isfinite().all()
    assert (values[..., -1] * torch.exp(log_scale)).item() == 1.0


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_denominator_of_true_zero_gives_zero_and_a_negative_one_divides(backend):
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    # cos(0), cos(pi) as the kernel of a query at 0: weights 1, -1, so denominators 1 and 1 - 1 = 0; with -1 alone, -1.
    k = torch.tensor([0.0, torch.pi], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.tensor([2.0, 5.0], dtype=torch.float64).view(1, 1, 2, 1)
    omega = torch.ones(1, 1, dtype=torch.float64)
    options = {"feature_map": "rks", "projection": omega, "backend": backend}
    assert kernel_attention(q, k, v, **options).flatten().tolist() == [2.0, 0.0]
    key_weights = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert kernel_attention(q, k, v, key_weights=key_weights, **options).flatten().tolist() == [0.0, 5.0]


@pytest.mark.parametrize("name", [name for name, form in FEATURE_MAPS.items() if form.sampled])
def test_fast_transforms_give_the_features_of_their_dense_matrix(name):
    """With two blocks, tokens padded from 6 to 8, and gradients of the tokens and all diagonals."""
    x = random(2, 3, 5, 6)
    diagonals = [random(3, 2, 8, seed=seed) for seed in (1, 2, 3)]
    order = random(3, 2, 8, seed=4).detach().argsort(-1)

    def run(backend):
        projection = FastFood(*diagonals, order)
        projection = dense(projection, 6) if backend == "reference" else projection
        values, logs = features(name, x[:, :, None], projection)
        return [values] if logs is None else [values * logs[..., None].exp()]

    assert_same(run, [x, *diagonals])


def test_a_fastfood_that_does_not_fit_is_refused():
    x = torch.zeros(1, 2, 3, 6)
    parts = FastFood(*torch.zeros(4, 2, 1, 8))
    with pytest.raises(
        ValueError, match=r"projection.signs has shape \(2, 1, 6\); expected \(2, blocks, 8\)"
    ):
        kernel_attention(x, x, x, feature_map="rks", projection=parts._replace(signs=torch.zeros(2, 1, 6)))
