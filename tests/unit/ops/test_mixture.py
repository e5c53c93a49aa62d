import pytest
import torch

from megakernel.ops import kernel_attention
from megakernel.ops.feature_maps import features
from megakernel.ops.mixture import mixed_features
from tests.unit.ops.comparing import assert_same, random

pytestmark = pytest.mark.usefixtures("small_chunks")

B, H, KV, M, N, WIDTH, VALUES = 2, 4, 2, 3, 23, 4, 3


def inputs():
    shapes = ((B, H, N, WIDTH), (B, KV, M, N, WIDTH), (B, KV, N, VALUES))
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("feature_map", ["elu", "favor"])
@pytest.mark.parametrize("causal", [True, False])
def test_mixtures_of_features_equal_the_reference(feature_map, causal):
    q, k, v = inputs()
    priors = random(KV, M, seed=3)
    projection = random(6, WIDTH, seed=4) if feature_map == "favor" else None

    def run(backend):
        out, state = kernel_attention(
            q,
            k,
            v,
            feature_map=feature_map,
            projection=projection,
            priors=priors.square(),
            causal=causal,
            return_state=True,
            backend=backend,
        )
        return out, state.sums * torch.exp(state.log_scale)[..., None, None]

    assert_same(run, [x for x in (q, k, v, priors, projection) if x is not None])


def test_a_component_without_weight_sets_no_scale():
    near, far = torch.zeros(1, 1, 1, 5, WIDTH), torch.full((1, 1, 1, 5, WIDTH), 60.0)
    omega = torch.eye(WIDTH)

    def phi(x):
        return features("favor", x, omega)

    alone = phi(near)
    mixed = mixed_features(phi, torch.cat([near, far], -1), torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(mixed, alone)


def test_priors_that_do_not_fit_are_named():
    q, k, v = inputs()
    for keys, priors in ((k, torch.ones(M)), (k[:, :, 0], torch.ones(KV, M))):
        with pytest.raises(ValueError, match=r"priors has shape .* expected \(heads, keys\)"):
            kernel_attention(q, keys, v, feature_map="elu", priors=priors)
