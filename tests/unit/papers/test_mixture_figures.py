"""Mixtures of keys: coefficients, likelihoods compared with an explicit density, and ratios of costs."""

import math
from types import SimpleNamespace

import pytest
import torch

from data_pipeline.batch import Batch
from megakernel.analysis.plots.subject import Subject, captured_attention, first_sequence
from megakernel.attention import AttentionInputs
from megakernel.papers.flurka import claims
from megakernel.papers.mixture_keys import costs, key_maps, mixtures
from tests.unit.analysis.plots.small_models import LENGTH, SIZES, layer_inputs, small_model
from tests.unit.config import trees


def test_mixing_coefficients_are_the_priors_of_the_layer():
    model = small_model("mgk")
    with torch.no_grad():
        model.layers[2].self_attention.core.mixture.weights.copy_(torch.tensor([[0.25, 0.75], [0.5, 0.125]]))
    rows = mixtures.measure_mixing(Subject(None, model, [], torch.device("cpu"), LENGTH))
    found = {(row["layer"], row["head"], row["key"]): row["pi"] for row in rows}
    assert [found[1, head, key] for head in (0, 1) for key in (0, 1)] == [0.25, 0.75, 0.5, 0.125]
    assert len(rows) == 2 * 2 * 2


@pytest.mark.parametrize(("config", "keys"), [("softmax", 1), ("mgk", 2), ("smgk", 1)])
def test_key_weights_times_a_layers_input_are_its_keys(config, keys):
    """The rows of figure 13 and the captured keys agree; a shifted mixture has one projection."""
    model = small_model(config, position="none")
    layer = model.layers[2].self_attention
    hidden = torch.randn(LENGTH, 1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(4))
    _, found, _ = layer._by_heads(layer._project(hidden, AttentionInputs()))
    found = found[0] if keys == 2 else found[0, :, None]
    rows = key_maps.measure_key_weights(Subject(None, model, [], torch.device("cpu"), LENGTH))
    names = (
        ["head 0", "head 1"]
        if keys == 1
        else [f"head {head}, key {key}" for head in (0, 1) for key in (0, 1)]
    )
    for number, name in enumerate(names):
        weights = [row["weight"] for row in rows if (row["layer"], row["matrix"]) == (1, name)]
        matrix = torch.tensor(weights).view(SIZES["hidden_size"], 8)
        torch.testing.assert_close(hidden[:, 0] @ matrix, found.flatten(0, 1)[number], rtol=1e-4, atol=1e-5)
    assert {row["matrix"] for row in rows} == set(names)


def test_low_rank_updates_are_part_of_the_weights_of_keys():
    attention = small_model("mgk").layers[1].self_attention
    before = key_maps.key_weights(attention)
    draw = torch.Generator().manual_seed(5)
    up, down = torch.randn(32, 3, generator=draw), torch.randn(3, 32, generator=draw)
    attention.key_update = SimpleNamespace(scale=2.0, up=up, down=down)
    change = (key_maps.key_weights(attention) - before).view(32, 32)
    torch.testing.assert_close(change, 2 * up @ down, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", ["softmax", "mgk", "smgk"])
def test_keys_are_those_of_the_first_tokens_before_rotation(config):
    model = small_model(config)
    captured = captured_attention(model, first_sequence(layer_inputs(), LENGTH))[1]
    tokens, positions = layer_inputs()[:2]
    subject = Subject(
        None, model, [Batch(tokens, tokens, tokens > -1, positions)], torch.device("cpu"), LENGTH
    )
    rows = [row for row in key_maps.measure_keys(subject) if row["layer"] == 1]
    expected = captured.inputs.k[0]
    if config == "smgk":
        shifts = captured.core.mixture.shift.detach()
        expected = expected[:, None] + shifts[:, :, None]
    names = {"softmax": "head 1", "mgk": "head 1, key 1", "smgk": "head 1, key 1"}
    values = torch.tensor([row["value"] for row in rows if row["matrix"] == names[config]]).view(LENGTH, 8)
    torch.testing.assert_close(values, expected[1] if config == "softmax" else expected[1, 1])


def normal(x, mean, variance):
    return math.exp(-((x - mean).square().sum().item()) / (2 * variance)) / (2 * math.pi * variance) ** (
        len(x) / 2
    )


@pytest.mark.parametrize(
    "config", ["mgk", "smgk", {"preset": "mgk", "mixture": {"sigma2": [1.0, 3.0]}}, "softmax"]
)
def test_the_likelihood_of_queries_equals_the_explicit_density(config):
    model = small_model(config, position="none")
    captured = captured_attention(model, first_sequence(layer_inputs(), LENGTH))[0]
    core, inputs = captured.core, captured.inputs
    found = mixtures.negative_log_likelihood(captured)
    mixture = getattr(core, "mixture", None)
    keys = inputs.k[0] if mixture is None else mixture.keys(inputs.k)[0].detach()
    keys = (keys if keys.dim() == 4 else keys[:, None]).double()
    priors = torch.ones(2, 1) if mixture is None else mixture.priors().detach()
    scales = getattr(core, "variances", None) or [1.0] * keys.shape[1]
    for head in (0, 3):
        own, pi = keys[head // 2], priors[head // 2] / priors[head // 2].sum()
        logs = []
        for i in range(LENGTH):
            first = 0 if i < 9 else 9
            density = sum(
                pi[r].item() * normal(inputs.q[0, head, i].double(), own[r, j], scales[r] * 8**0.5)
                for j in range(first, i + 1)
                for r in range(len(pi))
            )
            logs.append(math.log(density / (i + 1 - first)) / 8)
        assert found[head].item() == pytest.approx(-sum(logs) / LENGTH, rel=1e-5)


def subject_without_weights(**model):
    """A subject without weights, to compute costs."""
    return Subject(trees.config(model=model), None, [], torch.device("cpu"), LENGTH)


def test_half_the_heads_with_two_keys_cost_less():
    """Transformer-MGK, figure 3; the limit for long sequences is (6 D - 1) / (2 (4 D - 1)), about 3/4."""
    rows = costs.measure_mixture_costs(subject_without_weights(**SIZES, attention="mgk"))
    found = {(row["tokens"], row["width"]): row for row in rows}
    assert len(found) == len(rows) == len(costs.MIXTURE_TOKENS) * len(costs.WIDTHS)
    assert all(row["operations"] < 1 and row["parameters"] < 1 for row in rows)
    assert found[16384, 16]["operations"] == pytest.approx((6 * 16 - 1) / (2 * (4 * 16 - 1)), rel=0.03)
    # H D = D_x = n: queries, two keys and values of n / 2 and an output from n / 2, 2.5 n^2 of 4 n^2.
    assert found[256, 512]["parameters"] == pytest.approx(2.5 / 4, rel=1e-3)


def test_the_map_of_claims_shows_where_flurka_needs_fewer_operations():
    rows = claims.measure_claims(subject_without_weights(num_layers=1, hidden_size=512, num_heads=8))
    for row in rows:
        if row["claim_1"] and row["long_enough"]:
            assert min(row["over_low_rank"], row["over_kernel"]) > 1
    assert {row["claim_1"] for row in rows} == {0, 1}
    assert any(row["over_kernel"] < 1 for row in rows)
