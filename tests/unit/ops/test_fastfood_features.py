import pytest

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
