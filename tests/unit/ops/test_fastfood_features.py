import pytest
import torch

from megakernel.ops.fastfood_features import SAMPLED, fastfood_features
from megakernel.ops.phi import features
from megakernel.ops.projections import FastFood

from .comparing import assert_same, random


@pytest.mark.parametrize("feature_map", SAMPLED)
def test_fast_features_equal_those_of_the_dense_matrix(feature_map):
    """With two blocks, tokens padded from 6 to 8, and gradients of the tokens and all diagonals."""
    x = random(2, 3, 5, 6)
    diagonals = [random(3, 2, 8, seed=seed) for seed in (1, 2, 3)]
    order = random(3, 2, 8, seed=4).detach().argsort(-1)

    def run(backend):
        projection = FastFood(*diagonals, order)
        values, logs = fastfood_features(x, projection, feature_map=feature_map, backend=backend)
        return [values] if logs is None else [values * logs[..., None].exp()]

    assert_same(run, [x, *diagonals])


def test_attention_uses_the_same_features():
    x = random(1, 1, 4, 8).detach()
    scales, gaussians, signs, order = random(4, 1, 1, 8, seed=1).detach()
    projection = FastFood(scales, gaussians, signs, order.argsort(-1))
    ours = features("prf", x[:, :, None], projection)
    alone = fastfood_features(x, projection, feature_map="prf")
    assert ours.values[:, :, 0].equal(alone.values)
    assert ours.log_scale[:, :, 0].equal(alone.log_scale)


def test_arguments_that_do_not_fit_are_named():
    x, diagonals = random(1, 1, 3, 16).detach(), torch.ones(3, 1, 1, 16)
    order = torch.arange(16).view(1, 1, 16)
    with pytest.raises(ValueError, match="feature_map='elu'; expected one of"):
        fastfood_features(x, FastFood(*diagonals, order), feature_map="elu")
    two_heads = FastFood(*(part.expand(2, 1, 16) for part in diagonals), order.expand(2, 1, 16))
    with pytest.raises(
        ValueError, match=r"projection.scales has shape \(2, 1, 16\); expected \(1, blocks, 16\)"
    ):
        fastfood_features(x, two_heads, feature_map="rks")
    with pytest.raises(ValueError, match=r"x has shape \(1, 3, 16\)"):
        fastfood_features(x[0], FastFood(*diagonals, order), feature_map="rks")
