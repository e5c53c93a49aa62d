"""Effects of noise: covariances, kernel estimates, votes and gradients, compared with known numbers."""

import math
from dataclasses import replace

import pytest
import torch

from megakernel.analysis.plots import spectra
from megakernel.analysis.plots.subject import captured_attention, first_sequence
from megakernel.model import IGNORED
from megakernel.papers.learned_kernels import noise
from tests.unit.analysis.kernel_error import prf_error, prf_kernel
from tests.unit.analysis.plots.small_models import LENGTH, labelled, layer_inputs, small_model


@pytest.mark.parametrize("name", ["gmm_rks", "gmm_prf"])
def test_eigenvalues_are_those_of_the_constructed_covariance(name):
    model = small_model(name)
    mixture = model.layers[1].self_attention.core.projection
    eigenvalues = torch.tensor([0.01, 4.0, 0.5, 0.25, 1e-4, 2.0, 1.0, 0.125], dtype=torch.float64)
    with torch.no_grad():
        if name == "gmm_rks":
            draw = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            left, right = torch.linalg.qr(draw)[0]
            mixture.factor[1, 0] = left @ eigenvalues.sqrt().diag() @ right
        else:
            mixture.log_variance[1, 0] = eigenvalues.log()
    rows = [
        row
        for row in spectra.eigenvalue_rows(model)
        if (row["layer"], row["head"], row["component"]) == (0, 1, 0)
    ]
    assert [row["index"] for row in rows] == list(range(8))
    found = torch.tensor([row["eigenvalue"] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, eigenvalues.sort(descending=True).values, rtol=1e-4, atol=1e-7)


def test_the_deviation_of_kernel_estimates_is_that_of_theorem_3():
    """Over many draws std / |mean| approaches the closed form of the estimator's error (KL, theorem 3)."""
    config = {"preset": "gmm_prf", "feature_map": {"samples": 64}}
    model = small_model(config, num_heads=2, hidden_size=8, position="none")
    captured = captured_attention(model, first_sequence(layer_inputs(), LENGTH))[0]
    captured = captured._replace(
        inputs=replace(captured.inputs, q=captured.inputs.q / 4, k=captured.inputs.k / 4)
    )
    found = noise.kernel_deviations(captured, 400)
    mixture = captured.core.projection
    for head in range(2):
        means = mixture.mean[head].detach().double()
        factors = (mixture.log_variance[head].detach().double() / 2).exp().diag_embed()
        q, k = (x[0, head].double() * 4**-0.25 for x in (captured.inputs.q, captured.inputs.k))
        pair = means, factors, q[:, None], k[None]
        expected = prf_error(*pair, 64).sqrt() / prf_kernel(*pair)
        torch.testing.assert_close(found[head].median(), expected.median(), rtol=0.15, atol=0)


def test_a_feature_map_with_fixed_noise_has_no_deviation_to_measure():
    captured = captured_attention(small_model("performer"), first_sequence(layer_inputs(), LENGTH))[0]
    assert not noise.estimates_kernels(captured)


def votes(*predicted, label=1, probability=0.6):
    """Scores of single draws and of votes, from the classes that each draw predicts."""
    most_likely = torch.tensor(predicted)
    hits = most_likely == label
    logs = torch.where(hits, probability, 1 - probability).double().log()
    return noise.vote_rows(hits, most_likely, logs)


def test_a_vote_with_correct_majorities_beats_single_draws():
    rows = votes([1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1])  # four draws, three predictions
    assert [row["draws"] for row in rows] == [1, 2, 4]
    last = rows[-1]
    assert last["accuracy"] == pytest.approx(9 / 12)
    assert last["voting_accuracy"] == 1.0
    assert last["gain"] == pytest.approx(12 / 9)
    assert last["inconsistency"] == pytest.approx(25.0)
    assert last["loss"] == pytest.approx(-math.log((3 * 0.6 + 0.4) / 4))
    # The logit is +-log(0.6 / 0.4): three of four are positive, so its mean is half of it.
    assert last["deviation"] == pytest.approx(math.sqrt(1 - 0.25) / 0.5)


def test_a_prediction_that_every_draw_misses_is_wrong_in_the_vote():
    rows = votes([0, 1], [0, 1])
    assert rows[-1]["voting_accuracy"] == rows[-1]["accuracy"] == 0.5
    assert rows[-1]["inconsistency"] == 0


def test_predictions_cover_only_labels_that_count(mesh):
    model, batch = small_model("gmm_prf", mesh), labelled(2)
    with torch.no_grad():
        hits, most_likely, logs = noise.predictions(model, batch)
        losses = model.losses(*batch)[batch[2] != IGNORED]
        best = model.logits(model.hidden(*batch[:2])).argmax(-1)[batch[2] != IGNORED]
    torch.testing.assert_close(-logs, losses.double())
    assert most_likely.tolist() == best.tolist()
    assert hits.tolist() == (best == batch[2][batch[2] != IGNORED]).double().tolist()


def test_the_head_gradient_is_that_of_a_bias_on_its_input(mesh):
    model, batch = small_model("gmm_prf", mesh), labelled(2)
    found = noise.head_gradient(model, batch)
    with torch.no_grad():
        hidden, *rest = model.body(batch)
        for neuron in (0, 17):
            step = torch.zeros(hidden.shape[-1])
            step[neuron] = 1e-2
            up, down = (model.layers[-1]((hidden + sign * step, *rest)).item() for sign in (1, -1))
            assert found[neuron].item() == pytest.approx((up - down) / 2e-2, rel=2e-2, abs=2e-4)


def test_gradient_rows_have_the_deviation_over_draws_and_the_mean_size():
    rows = noise.gradient_rows(torch.tensor([[1.0, -2.0], [3.0, 2.0]], dtype=torch.float64))
    assert [(row["deviation"], row["absolute_mean"]) for row in rows] == [(1.0, 2.0), (2.0, 2.0)]
