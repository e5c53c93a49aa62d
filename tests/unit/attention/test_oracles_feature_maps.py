"""Feature maps with other people's weights against their outputs, in float64."""

import pytest
import torch
from torch import Tensor

from megakernel.attention import AttentionLayer, build
from megakernel.attention.features import FrequencyGenerator, Projection
from megakernel.ops import kernel_attention
from megakernel.ops.phi import features
from megakernel.ops.projections import FastFood, project
from tests.oracles import assert_equal, every_array
from tests.unit.analysis.kernel_error import rks_kernel

EPS = 1e-6
"""What their linear attention adds to a denominator; ours has nothing there."""

HEADS, WIDTH = 2, 16


def layer(name: str, **feature_map) -> AttentionLayer:
    tree = {"similarity": "kernel", "feature_map": {"name": name, **feature_map}}
    return build(tree, num_heads=HEADS, head_dim=WIDTH, causal=False).double()


def load(module: torch.nn.Module, **weights: Tensor) -> None:
    """Put weights in place by name, expanded over heads where theirs are shared."""
    state = module.state_dict()
    for name, value in weights.items():
        state[name].copy_(value)


def attention(
    projection: Projection, of: dict[str, Tensor], *, masked: bool = False, eps: float = EPS
) -> Tensor:
    """Their output from our features, with `eps` in the denominator."""
    key_weights = (torch.arange(96) < of["lengths"][:, None])[:, None].double() if masked else None
    values = torch.nn.functional.pad(of["v"], (0, 1), value=1.0)
    sums = kernel_attention(
        of["q"],
        of["k"],
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
    of = every_array("rff_idiap")
    for smoothing, prefix in ((0.0, ""), (1.0, "smooth_")):
        projection = layer("rff", samples=32, smoothing=smoothing).projection
        load(projection, **{"matrix.values": of["omega"].T})
        assert_equal(phi(projection, of["q"])[..., :64], of["phi_q"])
        assert_equal(phi(projection, of["k"])[..., :64], of["phi_k"])
        # Denominators near 0 without smoothing: both sides round to 4e-10 of the largest outputs (README).
        assert_equal(attention(projection, of), of[f"{prefix}out"])
        assert_equal(attention(projection, of, masked=True), of[f"{prefix}out_masked"])


@pytest.mark.parametrize("smoothing", [0.0, 0.36, 1.0])
def test_gmm_rks_equals_learning_the_kernel(smoothing):
    of = every_array("kl_gmm_rks")
    projection = layer("gmm_rks", samples=32, smoothing=smoothing).projection
    load(projection, **{"noise.values": of["omega_base"].T, "mean": of["mean"][:, None]})
    load(projection, factor=of["sigma"][:, None])
    ours = phi(projection, of["q"])[..., :128]
    # Theirs goes cos+, sin+, cos-, sin-; ours cos+, cos-, sin+, sin-.
    theirs = of["phi_q"].unflatten(-1, (2, 2, 32)).transpose(-3, -2).flatten(-3)
    assert_equal(ours, theirs)
    suffix = f"_smooth{smoothing}" if smoothing else ""
    assert_equal(attention(projection, of), of[f"out{suffix}"])
    assert_equal(attention(projection, of, masked=True), of[f"out_masked{suffix}"])


def test_the_kernel_that_gmm_rks_estimates_is_the_closed_form():
    of = every_array("kl_gmm_rks")
    for head in range(HEADS):
        mean, factor = of["mean"][head], of["sigma"][head]
        q, k = (of[name][:, head, :16] * WIDTH**-0.25 for name in ("q", "k"))
        kernel = rks_kernel(
            torch.stack([mean, -mean]), torch.stack([factor, factor]), q[:, :, None], k[:, None]
        )
        assert_equal(kernel, of["closed_form_kernel"][:, head])


@pytest.mark.parametrize("initial", ["official_init", "paper_init"])
@pytest.mark.parametrize("kind", ["rks", "prf"])
def test_fastfood_equals_learning_the_kernel(initial, kind):
    of = every_array("kl_fastfood")
    theirs = {key.removeprefix(f"{initial}."): value for key, value in of.items()}
    parts = {"scales": theirs["S"], "gaussians": theirs["G"], "signs": theirs["B"]}
    for smoothing, suffix in ((0.0, ""), (1.0, "_smooth1.0")):
        if f"{kind}_out{suffix}" not in theirs:
            continue
        projection = layer(f"fastfood_{kind}", samples=WIDTH, smoothing=smoothing).projection
        load(projection, **parts, **{"permutation.values": theirs["P"]})
        width = theirs[f"{kind}_phi_q"].shape[-1]
        assert_equal(phi(projection, of["q"])[..., :width], theirs[f"{kind}_phi_q"])
        assert_equal(phi(projection, of["k"])[..., :width], theirs[f"{kind}_phi_k"])
        # One array has denominators near 0, so that rounding is amplified (README).
        ill = (initial, kind, smoothing) == ("paper_init", "rks", 0.0)
        assert_equal(attention(projection, of), theirs[f"{kind}_out{suffix}"], 1e-7 if ill else 1e-9)
        if f"{kind}_out{suffix}_masked" in theirs:
            assert_equal(attention(projection, of, masked=True), theirs[f"{kind}_out{suffix}_masked"])


def test_fastfood_has_the_papers_matrix():
    of = every_array("kl_fastfood")
    for initial in ("official_init", "paper_init"):
        parts = [of[f"{initial}.{name}"].view(1, 1, WIDTH) for name in "SGBP"]
        unit = torch.eye(WIDTH, dtype=torch.float64).view(1, 1, 1, WIDTH, WIDTH)
        assert_equal(project(unit, FastFood(*parts)).view(WIDTH, WIDTH).T, of[f"{initial}.V"])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_generative_prf_equals_learning_the_kernel(mode):
    of = every_array("kl_generative_prf")
    projection = layer("generative_prf", samples=32).projection
    # Their generator has two hidden layers, of 32 and 64.
    generator = FrequencyGenerator([8, 32, 64, WIDTH], torch.Generator()).double()
    theirs = {
        "weight": "linear.weight",
        "bias": "linear.bias",
        "scale": "batch_norm.weight",
        "shift": "batch_norm.bias",
        "mean": "batch_norm.running_mean",
        "variance": "batch_norm.running_var",
    }
    for index, hidden in enumerate(generator.hidden):
        load(hidden, **{ours: of[f"w.generator_layers.{index}.{name}"] for ours, name in theirs.items()})
    load(
        generator,
        weight=of["w.generator_layers.2.linear.weight"],
        bias=of["w.generator_layers.2.linear.bias"],
    )
    projection.generator = generator
    projection.noise.values = of["noise"]
    projection.train(mode == "train")
    assert_equal(projection(), of[f"{mode}.omega"])
    # Theirs divides by sqrt(2 M), which cancels in attention.
    assert_equal(phi(projection, of["q"]) / 2**0.5, of[f"{mode}.phi_q"])
    assert_equal(phi(projection, of["k"]) / 2**0.5, of[f"{mode}.phi_k"])
    # The factor halves their denominator, next to which EPS is twice as large.
    assert_equal(attention(projection, of, eps=2 * EPS), of[f"{mode}.out"])
    assert_equal(attention(projection, of, eps=2 * EPS, masked=True), of[f"{mode}.out_masked"])
