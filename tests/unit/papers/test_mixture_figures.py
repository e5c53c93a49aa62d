"""Mixtures of keys: coefficients, likelihoods compared with an explicit density, and ratios of costs."""

import math

import pytest
import torch

from megakernel.analysis.plots.subject import Subject, captured_attention, first_sequence
from megakernel.papers.flurka import claims
from megakernel.papers.mixture_keys import costs, mixtures
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
