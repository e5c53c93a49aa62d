import pytest
import torch

from megakernel.attention import Rotary
from megakernel.ops.feature_maps import LayerMap
from megakernel.ops.flurka_attention import flurka_attention
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.weighted_attention import weighted_attention
from megakernel.ops.window_attention import window_attention
from tests.unit.ops.comparing import assert_same, random

pytestmark = pytest.mark.usefixtures("small_chunks")

B, H, KV, M, N, WIDTH, VALUES = 2, 4, 2, 3, 23, 4, 3


def inputs():
    shapes = ((B, H, N, WIDTH), (B, KV, M, N, WIDTH), (B, KV, N, VALUES))
    return [random(*shape, seed=i) for i, shape in enumerate(shapes)]


def test_a_component_of_prior_0_does_not_set_the_scale():
    near, far = torch.zeros(1, 1, 1, 5, WIDTH), torch.full((1, 1, 1, 5, WIDTH), 60.0)
    phi = LayerMap("favor", torch.eye(WIDTH), torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(phi.of_keys(torch.cat([near, far], -1)), phi.of_queries(near))


NEAR = ["softmax", "gated", "kernel"]


def flurka(q, k, v, near: str, feature_map: str = "elu", **options):
    """Causal FLuRKA with random pools and rotated landmarks; `near` selects the near part and the normalizer."""
    return flurka_attention(
        q,
        k,
        v,
        feature_map=feature_map,
        projection=random(6, WIDTH, seed=4) if feature_map == "favor" else None,
        near="kernel" if near == "kernel" else "softmax",
        gate=torch.zeros(H, 1, dtype=q.dtype) if near == "gated" else None,
        pool_keys=random(2, 4, seed=5).softmax(-1),
        pool_values=random(2, 4, seed=6).softmax(-1),
        rotary=Rotary(WIDTH),
        far_rope="centroid",
        **options,
    )[0]


@pytest.mark.parametrize("near", NEAR)
def test_keys_shifted_at_tokens_and_landmarks_are_keys_shifted_before(near):
    """E (k + b) = E k + b, since the rows of E have sum 1."""
    q, _, v = inputs()
    k, shift, priors = random(B, KV, N, WIDTH, seed=7), random(KV, M, WIDTH, seed=8), random(KV, M).square()
    inside = flurka(q, k, v, near, priors=priors, shift=shift)
    before = flurka(q, k[:, :, None] + shift[:, :, None], v, near, priors=priors)
    torch.testing.assert_close(inside, before)


@pytest.mark.parametrize("near", NEAR)
def test_equal_keys_count_as_one(near):
    q, k, v = inputs()
    one = k[:, :, 0]
    priors = torch.tensor([[0.5, 0.2, 0.3], [0.0, 0.9, 0.1]], dtype=q.dtype)
    mixed = flurka(q, one[:, :, None].expand_as(k), v, near, priors=priors)
    torch.testing.assert_close(mixed, flurka(q, one, v, near))


@pytest.mark.parametrize("size", [1, 4])
def test_as_many_landmarks_as_tokens_is_exact_kernel_attention_with_mixture_keys(size):
    q, k, v = inputs()
    options = {"feature_map": "elu", "priors": random(KV, M, seed=3).square()}
    identity = torch.eye(size, dtype=torch.float64)
    out, _ = flurka_attention(q, k, v, near="kernel", pool_keys=identity, pool_values=identity, **options)
    torch.testing.assert_close(out, kernel_attention(q, k, v, **options))


def test_a_window_as_long_as_the_sequence_is_a_softmax_mixture():
    q, k, v = inputs()
    priors = random(KV, M, seed=3).square()
    out, _ = window_attention(q, k, v, block_size=N, priors=priors)
    exact, _ = weighted_attention(q, k, v, similarity="softmax", key_weights=priors[..., None])
    torch.testing.assert_close(out, exact)


def test_softmax_mixtures_of_another_number_of_keys_than_queries_equal_the_reference():
    q, _, _ = inputs()
    k, v, root = random(B, KV, M, 9, WIDTH, seed=1), random(B, KV, 9, VALUES, seed=2), random(KV, M, seed=3)

    def run(backend):
        key_weights = root.square()[..., None]
        return weighted_attention(
            q, k, v, similarity="softmax", key_weights=key_weights, causal=False, backend=backend
        )[:1]

    assert_same(run, [q, k, v, root])


def test_a_key_of_prior_0_makes_no_window_underflow():
    q, k, v = (x.detach().float() for x in inputs())
    # Its product with a query is in the thousands, so relative to it every other weight underflows in float32.
    shouting = torch.cat([k, 1000 * q[:, ::2, None]], 2)
    priors = random(KV, M, seed=3).detach().float().square()
    silent = torch.cat([priors, torch.zeros(KV, 1)], 1)
    for near in NEAR:
        torch.testing.assert_close(
            flurka(q, shouting, v, near, priors=silent), flurka(q, k, v, near, priors=priors)
        )


def test_priors_that_do_not_fit_are_named():
    q, k, v = inputs()
    pool = torch.eye(4, dtype=torch.float64)
    for keys, priors in ((k, torch.ones(M)), (k[:, :, 0], torch.ones(KV, M))):
        with pytest.raises(ValueError, match=r"priors has shape .* expected \(heads, keys\)"):
            kernel_attention(q, keys, v, feature_map="elu", priors=priors)
        with pytest.raises(ValueError, match=r"priors has shape .* expected \(heads, keys\)"):
            flurka_attention(q, keys, v, feature_map="elu", pool_keys=pool, pool_values=pool, priors=priors)
        with pytest.raises(ValueError, match=r"priors has shape .* expected \(heads, keys\)"):
            window_attention(q, keys, v, block_size=4, priors=priors)


@pytest.mark.parametrize(
    ("shift", "priors", "message"),
    [
        ((KV, M, WIDTH), None, "no priors"),
        ((KV, M, WIDTH), (KV, 2), r"priors \(2, 2\)"),
        ((M, WIDTH), (KV, M), r"priors \(2, 3\)"),
        ((KV, M, 3), (KV, M), r"priors \(2, 3\)"),
    ],
)
def test_shifts_that_do_not_fit_are_named(shift, priors, message):
    q, k, v = inputs()
    options = {"shift": torch.ones(shift), "priors": None if priors is None else torch.ones(priors)}
    with pytest.raises(
        ValueError, match=rf"shift has shape .* and {message}; expected \(heads, keys, width\)"
    ):
        window_attention(q, k[:, :, 0], v, block_size=4, **options)
