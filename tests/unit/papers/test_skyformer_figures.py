"""Skyformer's figure 1 and table 3: errors and instability in cases with known values."""

import pytest
import torch

from megakernel.attention import build
from megakernel.config import Optimizer
from megakernel.papers.skyformer import measurements as skyformer
from megakernel.papers.skyformer.pseudo_inverse import exact_inverse
from tests.unit.analysis.plots.small_models import labelled, small_model

TOKENS, WIDTH = 48, 8


@pytest.fixture(scope="module")
def qkv():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 1, 2, TOKENS, WIDTH, generator=draw, dtype=torch.float64)


def test_the_error_is_the_relative_spectral_norm_of_the_difference():
    exact = torch.diag_embed(torch.tensor([[[4.0, 2.0], [10.0, 1.0]]]))
    output = exact + torch.diag_embed(torch.tensor([[[0.5, -1.0], [0.0, 0.0]]]))
    assert skyformer.relative_error(output, exact) == pytest.approx((1 / 4 + 0) / 2)


def test_skyformer_with_all_tokens_as_landmarks_is_softmax(qkv):
    """With all 2N queries and keys as landmarks, C M^+ C = C up to rounding."""
    exact = build("softmax", num_heads=2, head_dim=WIDTH, causal=False)(*qkv)
    every = torch.arange(2 * TOKENS).expand(2, -1)
    found = skyformer.softmax_nystrom(*qkv, every, exact_inverse)
    assert skyformer.relative_error(found, exact) < 1e-6


def test_more_features_bring_approximations_closer_to_softmax(qkv):
    found = skyformer.errors(*(x * 0.5 if i < 2 else x for i, x in enumerate(qkv)))
    mechanisms = {name for name, _ in found}
    assert {"performer", "linformer", "flurka_performer", "nystromformer", "uniform"} < mechanisms
    for name, features in (("performer", 256), ("skyformer, exact inverse", 256), ("nystromformer", 32)):
        assert found[name, features] < 0.8 * found[name, 16]
    assert found["skyformer, exact inverse", 32] < 0.5 * found["uniform", 32]
    assert ("nystromformer", 64) not in found, "more landmarks than tokens"


def test_equal_queries_have_uniform_attention(qkv):
    zeros = torch.zeros_like(qkv[0])
    found = skyformer.errors(zeros, zeros, qkv[2])
    assert found["uniform", 16] < 1e-12
    assert found["performer", 16] < 1e-12


def test_compared_models_are_the_model_of_the_run_with_other_attention():
    decoder = small_model("flurka", num_layers=3).settings.model
    found = skyformer.compared_models(decoder)
    assert list(found) == ["run", "softmax", "gaussian", "kernelized"]
    assert {model.num_layers for model in found.values()} == {2}
    assert found["kernelized"].attention.normalize is False
    encoder = small_model("softmax", kind="masked_lm").settings.model
    assert list(skyformer.compared_models(encoder)) == [
        "softmax",
        "gaussian",
        "kernelized",
        "skyformer",
        "nystromformer",
    ]


def test_the_instability_score_is_the_change_of_the_output_over_that_of_the_weights(mesh, monkeypatch):
    """For a model whose hidden states are its embeddings, after a step that changes only these."""
    monkeypatch.setattr(skyformer, "STEPS", 1)
    batch = labelled(1)
    model = small_model("softmax", mesh, num_layers=1, tie_embeddings=False, vocab_size=32)
    layer = model.layers[1]
    with torch.no_grad():  # the layer adds zero: hidden states are embeddings
        layer.self_attention.output.weight.zero_()
        layer.mlp.linear_fc2.weight.zero_()
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    [score] = skyformer.instability(model, [batch], Optimizer(lr=1e-3, weight_decay=0.0))
    moved = {name: x.detach() - before[name] for name, x in model.named_parameters()}
    weights = sum(x.double().square().sum() for x in moved.values())
    after = skyformer.hidden_states(model, batch)
    for name, x in model.named_parameters():
        x.data.copy_(before[name])
    shift = (after - skyformer.hidden_states(model, batch)).square().sum()
    assert score == pytest.approx((shift / weights).item(), rel=1e-4)
    assert score > 0
