import math

import pytest
import torch
from torch import Tensor, nn

from data_pipeline.batch import Batch
from megakernel.attention import build, redraw
from megakernel.attention.noise import Noise
from megakernel.config import PRESETS, Attention, expand_preset
from megakernel.evaluation.classification import predict_examples
from megakernel.evaluation.perplexity import loss_by_position
from megakernel.evaluation.result import Evaluation
from megakernel.evaluation.voting import mean_over_draws, vote_scores


def outputs(name: str, draws: int):
    module = build({"similarity": "kernel", "feature_map": {"name": name}}, num_heads=2, head_dim=4).eval()
    redraw(module, 250)
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    return module, lambda: module(q, k, v), draws


def test_the_vote_is_the_mean_over_draws_and_restores_the_model():
    module, predict, draws = outputs("gmm_prf", 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    predictions = []

    def recorded_prediction():
        predictions.append(predict())
        return predictions[-1]

    vote = mean_over_draws(module, recorded_prediction, draws)
    torch.testing.assert_close(vote, torch.stack(predictions).mean(0))
    assert len(predictions) == draws
    assert all(not torch.equal(a, b) for i, a in enumerate(predictions) for b in predictions[:i])
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    before_redraw = predict()
    redraw(module, 299)
    assert torch.equal(predict(), before_redraw)


def test_more_draws_bring_the_vote_closer_to_the_exact_kernel():
    module, predict, _ = outputs("gmm_rks", 0)
    exact = mean_over_draws(module, predict, 500)

    def error(draws: int) -> float:
        return (mean_over_draws(module, predict, draws) - exact).norm().item()

    assert error(64) < error(1) / 2


def test_fixed_random_numbers_are_not_redrawn():
    module, predict, _ = outputs("favor", 0)
    assert torch.equal(mean_over_draws(module, predict, 3), predict())


def test_zero_draws_are_refused():
    with pytest.raises(ValueError, match="draws=0"):
        mean_over_draws(torch.nn.Identity(), lambda: torch.zeros(1), 0)


PROBABILITIES = {0: 0.9, -1: 0.5, -2: 0.1, -3: 0.3}
"""Number of a draw -> its predicted probability."""


class Guess(nn.Module):
    """A model of two tokens or classes that takes the probability of the first from the noise."""

    def __init__(self):
        super().__init__()
        self.noise = Noise(lambda number: torch.tensor(PROBABILITIES[number]), interval=100)

    def losses(self, tokens: Tensor, *_: Tensor) -> Tensor:
        return -self.noise().log().expand(tokens.shape)

    def log_probabilities(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.stack([self.noise(), 1 - self.noise()]).log().expand(len(tokens), 2)


class Batches(list):
    """One batch of three sequences of one token, the last of which does not count."""

    samples = 2

    def __init__(self, labels: Tensor):
        zeros = torch.zeros(3, 1, dtype=torch.int64)
        mask = torch.tensor([True, True, False])
        super().__init__([Batch(zeros, labels, mask.view(labels.shape), zeros)])


@pytest.mark.parametrize(("draws", "probability"), [(None, 0.9), (1, 0.5), (3, (0.5 + 0.1 + 0.3) / 3)])
def test_the_vote_of_a_language_model_is_the_mean_probability_of_each_token(draws, probability):
    batches = Batches(torch.zeros(3, 1, dtype=torch.int64))
    [bucket] = loss_by_position(Guess().eval(), batches, torch.device("cpu"), lambda *_: None, draws)
    assert bucket.tokens == 2
    assert bucket.loss == pytest.approx(-math.log(probability))


@pytest.mark.parametrize(("draws", "probability"), [(None, 0.9), (1, 0.5), (3, (0.5 + 0.1 + 0.3) / 3)])
def test_the_vote_of_a_classifier_is_the_mean_probability_of_each_class(draws, probability):
    batches = Batches(torch.zeros(3, dtype=torch.int64))
    found = predict_examples(Guess().eval(), batches, torch.device("cpu"), lambda *_: None, draws)
    assert len(found.labels) == 2
    assert found.loss == pytest.approx(-math.log(probability))
    assert found.accuracy == (probability >= 0.5)


def test_a_classifier_with_draws_has_the_scores_of_single_draws_and_of_their_majority():
    def vote(label: int) -> dict[str, float | None]:
        batches = Batches(torch.full((3,), label))
        return predict_examples(Guess().eval(), batches, torch.device("cpu"), lambda *_: None, 3).vote

    # Probabilities of class 0 are 0.5, 0.1 and 0.3, so one draw of three predicts it.
    logits = torch.tensor([0.5, 0.1, 0.3]).logit()
    deviation = (logits.std(correction=0) / logits.mean().abs()).item()
    shared = {"inconsistency": pytest.approx(100 / 3), "deviation": pytest.approx(deviation, rel=1e-5)}
    assert vote(1) == {"accuracy": 2 / 3, "voting_accuracy": 1.0, "gain": 1.5, **shared}
    assert vote(0) == {"accuracy": 1 / 3, "voting_accuracy": 0.0, "gain": 0.0, **shared}


def test_without_draws_there_is_no_vote():
    batches = Batches(torch.zeros(3, dtype=torch.int64))
    assert predict_examples(Guess().eval(), batches, torch.device("cpu"), lambda *_: None).vote is None


def test_a_vote_of_draws_that_are_never_right_has_no_gain():
    scores = vote_scores(
        torch.tensor([0]), torch.tensor([[1], [1]]), torch.tensor([[0.1], [0.2]]).double().log()
    )
    assert scores["gain"] is None
    vote = Evaluation("runs/x", 1, 1, 32, 1, 1.0, None, 0.0, [], draws=2, scores={"f1": 0.0}, vote=scores)
    assert "vote/gain" not in vote.scalars()
    assert vote.table().below[-2] == "single draws: accuracy 0.0%; their vote: 0.0%"


def test_the_table_has_the_vote_below():
    scores = {
        "accuracy": 0.5,
        "voting_accuracy": 0.75,
        "gain": 1.5,
        "inconsistency": 12.345,
        "deviation": 0.25,
    }
    found = Evaluation("runs/x", 1, 1, 32, 4, 1.0, None, 0.5, [], draws=2, scores={"f1": 0.5}, vote=scores)
    assert found.table().below[-2:] == (
        "single draws: accuracy 50.0%; their vote: 75.0%, gain 1.500",
        "inconsistency 12.35 %, deviation 0.2500",
    )
    assert found.scalars()["vote/gain"] == found.as_dict()["vote"]["gain"] == 1.5


@pytest.mark.parametrize("preset", PRESETS)
def test_redraws_says_whether_a_mechanism_has_draws_to_average(preset):
    config = Attention.model_validate(expand_preset(preset))
    module = build(
        preset, num_heads=2, head_dim=8, causal=config.mixes_future_tokens is None, max_positions=64
    )
    redrawn = any(isinstance(noise, Noise) and noise.interval for noise in module.modules())
    assert config.redraws == redrawn
