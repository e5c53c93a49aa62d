import math

import pytest
import torch

from megakernel.ops.feature_maps import FEATURE_MAPS, features


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


def test_favor_is_positive_and_never_overflows():
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
