"""Feature maps against outputs of published implementations with the same weights, in float64."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionLayer, build
from megakernel.attention.map_parameters import FrequencyGenerator, Projection
from megakernel.config.feature_map import FeatureMap, FeatureMapName
from megakernel.ops.feature_maps import features
from megakernel.ops.kernel_attention import kernel_attention
from megakernel.ops.projections import FastFood, project
from tests.oracles import assert_equal, every_array
from tests.unit.analysis.kernel_error import rks_kernel

EPS = 1e-6
"""Published linear attention adds this to denominators; megakernel adds nothing."""

HEADS, WIDTH = 2, 16


def layer(name: str, **feature_map) -> AttentionLayer:
    tree = {"similarity": "kernel", "feature_map": {"name": name, **feature_map}}
    return build(tree, num_heads=HEADS, head_dim=WIDTH, causal=False).double()


def load(module: torch.nn.Module, **weights: Tensor) -> None:
    """Copy weights by name; `copy_` expands those that the published code shares over heads."""
    state = module.state_dict()
    for name, value in weights.items():
        state[name].copy_(value)


def attention(
    projection: Projection, oracle: dict[str, Tensor], *, masked: bool = False, eps: float = EPS
) -> Tensor:
    """Attention over the features with `eps` in the denominator, as in the published code."""
    key_weights = (torch.arange(96) < oracle["lengths"][:, None])[:, None].double() if masked else None
    values = torch.nn.functional.pad(oracle["v"], (0, 1), value=1.0)
    sums = kernel_attention(
        oracle["q"],
        oracle["k"],
        values,
        feature_map=projection.feature_map,
        projection=projection(),
        causal=False,
        normalize=False,
        key_weights=key_weights,
    )
    return sums[..., :-1] / (sums[..., -1:] + eps)


def phi(projection: Projection, x: Tensor) -> Tensor:
    values, log_scale = features(projection.feature_map, x[:, :, None], projection())
    return (values if log_scale is None else values * torch.exp(log_scale)[..., None])[:, :, 0]


def test_rff_equals_idiap():
    oracle = every_array("rff_idiap")
    for smoothing, prefix in ((0.0, ""), (1.0, "smooth_")):
        projection = layer("rff", samples=32, smoothing=smoothing).projection
        load(projection, **{"matrix.values": oracle["omega"].T})
        assert_equal(phi(projection, oracle["q"])[..., :64], oracle["phi_q"])
        assert_equal(phi(projection, oracle["k"])[..., :64], oracle["phi_k"])
        # Denominators near 0 without smoothing: both implementations round to 4e-10 of the largest output (README).
        assert_equal(attention(projection, oracle), oracle[f"{prefix}out"])
        assert_equal(attention(projection, oracle, masked=True), oracle[f"{prefix}out_masked"])


@pytest.mark.parametrize("smoothing", [0.0, 0.36, 1.0])
def test_gmm_rks_equals_learning_the_kernel(smoothing):
    oracle = every_array("kl_gmm_rks")
    projection = layer("gmm_rks", samples=32, smoothing=smoothing).projection
    load(projection, **{"noise.values": oracle["omega_base"].T, "mean": oracle["mean"][:, None]})
    load(projection, factor=oracle["sigma"][:, None])
    actual = phi(projection, oracle["q"])[..., :128]
    # The published order is cos+, sin+, cos-, sin-; here it is cos+, cos-, sin+, sin-.
    expected = oracle["phi_q"].unflatten(-1, (2, 2, 32)).transpose(-3, -2).flatten(-3)
    assert_equal(actual, expected)
    suffix = f"_smooth{smoothing}" if smoothing else ""
    assert_equal(attention(projection, oracle), oracle[f"out{suffix}"])
    assert_equal(attention(projection, oracle, masked=True), oracle[f"out_masked{suffix}"])


def test_the_kernel_of_gmm_rks_has_the_published_closed_form():
    oracle = every_array("kl_gmm_rks")
    for head in range(HEADS):
        mean, factor = oracle["mean"][head], oracle["sigma"][head]
        q, k = (oracle[name][:, head, :16] * WIDTH**-0.25 for name in ("q", "k"))
        kernel = rks_kernel(
            torch.stack([mean, -mean]), torch.stack([factor, factor]), q[:, :, None], k[:, None]
        )
        assert_equal(kernel, oracle["closed_form_kernel"][:, head])


@pytest.mark.parametrize("initial", ["official_init", "paper_init"])
@pytest.mark.parametrize("kind", ["rks", "prf"])
def test_fastfood_equals_learning_the_kernel(initial, kind):
    oracle = every_array("kl_fastfood")
    published = {key.removeprefix(f"{initial}."): value for key, value in oracle.items()}
    parts = {"scales": published["S"], "gaussians": published["G"], "signs": published["B"]}
    for smoothing, suffix in ((0.0, ""), (1.0, "_smooth1.0")):
        if f"{kind}_out{suffix}" not in published:
            continue
        projection = layer(f"fastfood_{kind}", samples=WIDTH, smoothing=smoothing).projection
        load(projection, **parts, **{"permutation.values": published["P"]})
        width = published[f"{kind}_phi_q"].shape[-1]
        assert_equal(phi(projection, oracle["q"])[..., :width], published[f"{kind}_phi_q"])
        assert_equal(phi(projection, oracle["k"])[..., :width], published[f"{kind}_phi_k"])
        # One array has denominators near 0, so that rounding is amplified (README).
        ill_conditioned = (initial, kind, smoothing) == ("paper_init", "rks", 0.0)
        assert_equal(
            attention(projection, oracle), published[f"{kind}_out{suffix}"], 1e-7 if ill_conditioned else 1e-9
        )
        if f"{kind}_out{suffix}_masked" in published:
            assert_equal(attention(projection, oracle, masked=True), published[f"{kind}_out{suffix}_masked"])


def test_fastfood_equals_the_published_matrix():
    oracle = every_array("kl_fastfood")
    for initial in ("official_init", "paper_init"):
        parts = [oracle[f"{initial}.{name}"].view(1, 1, WIDTH) for name in "SGBP"]
        unit = torch.eye(WIDTH, dtype=torch.float64).view(1, 1, 1, WIDTH, WIDTH)
        assert_equal(project(unit, FastFood(*parts)).view(WIDTH, WIDTH).T, oracle[f"{initial}.V"])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_generative_prf_equals_learning_the_kernel(mode):
    oracle = every_array("kl_generative_prf")
    projection = layer("generative_prf", samples=32).projection
    # The published generator has two hidden layers, of 32 and 64.
    generator = FrequencyGenerator([8, 32, 64, WIDTH], torch.Generator()).double()
    names = {
        "weight": "linear.weight",
        "bias": "linear.bias",
        "scale": "batch_norm.weight",
        "shift": "batch_norm.bias",
        "mean": "batch_norm.running_mean",
        "variance": "batch_norm.running_var",
    }
    for index, hidden in enumerate(generator.hidden):
        load(hidden, **{key: oracle[f"w.generator_layers.{index}.{name}"] for key, name in names.items()})
    load(
        generator,
        weight=oracle["w.generator_layers.2.linear.weight"],
        bias=oracle["w.generator_layers.2.linear.bias"],
    )
    projection.generator = generator
    projection.noise.values = oracle["noise"]
    projection.train(mode == "train")
    assert_equal(projection(), oracle[f"{mode}.omega"])
    # The published features are divided by sqrt(2 M), which cancels in attention.
    assert_equal(phi(projection, oracle["q"]) / 2**0.5, oracle[f"{mode}.phi_q"])
    assert_equal(phi(projection, oracle["k"]) / 2**0.5, oracle[f"{mode}.phi_k"])
    # The factor halves the published denominator, so EPS counts twice.
    assert_equal(attention(projection, oracle, eps=2 * EPS), oracle[f"{mode}.out"])
    assert_equal(attention(projection, oracle, eps=2 * EPS, masked=True), oracle[f"{mode}.out_masked"])


@torch.no_grad()
@pytest.mark.parametrize("smoothing", [0.0, 0.5])
@pytest.mark.parametrize("name", FeatureMapName.__args__)
def test_the_configuration_knows_the_width_of_every_map_and_the_similarity_of_zeros(name, smoothing):
    projection = layer(name, smoothing=smoothing).projection
    config = FeatureMap(name=name, smoothing=smoothing)
    of_zeros = phi(projection, torch.zeros(1, HEADS, 1, WIDTH, dtype=torch.float64))
    assert of_zeros.shape[-1] == config.width(WIDTH)
    expected = torch.full_like(of_zeros[..., 0], config.similarity_at_zero(WIDTH))
    torch.testing.assert_close(of_zeros.square().sum(-1), expected)
