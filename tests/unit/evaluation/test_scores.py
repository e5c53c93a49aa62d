"""Scores of predictions against hand-computed values."""

import math

import pytest
import torch

from megakernel.evaluation.classification import ExamplePredictions


def classes(labels: list[int], predicted: list[int], count: int) -> ExamplePredictions:
    """Predictions of these classes, each with probability 0.9."""
    outputs = torch.full((len(labels), count), 0.1 / (count - 1))
    outputs[range(len(labels)), predicted] = 0.9
    return ExamplePredictions(torch.tensor(labels), outputs.log())


def numbers(labels: list[float], predicted: list[float]) -> ExamplePredictions:
    return ExamplePredictions(torch.tensor(labels), torch.tensor(predicted)[:, None])


def test_two_classes_have_accuracy_matthews_and_f1():
    # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives.
    found = classes([1, 1, 1, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0], 2)
    assert found.accuracy == pytest.approx(0.7)
    assert found.scores["f1"] == pytest.approx(3 / (3 + (1 + 2) / 2))
    assert found.scores["matthews"] == pytest.approx((3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6))
    assert found.loss == pytest.approx(-(0.7 * math.log(0.9) + 0.3 * math.log(0.1)), rel=1e-6)


def test_three_classes_have_no_f1():
    found = classes([0, 1, 2, 2], [0, 1, 2, 0], 3)
    assert found.accuracy == pytest.approx(0.75)
    assert set(found.scores) == {"matthews"}


def test_regression_has_correlations_and_no_accuracy():
    found = numbers([0.0, 1.0, 2.0, 4.0], [0.0, 1.0, 8.0, 3.0])
    assert found.accuracy is None
    assert found.loss == pytest.approx((36 + 1) / 4)
    assert found.scores["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    # Means 1.75 and 3; products of deviations -1.75*-3 + -0.75*-2 + 0.25*5 + 2.25*0 = 8; squares 8.75 and 38.
    assert found.scores["pearson"] == pytest.approx(8 / math.sqrt(8.75 * 38))


def test_constant_predictions_score_0():
    assert numbers([0.0, 1.0], [2.0, 2.0]).scores == {"pearson": 0.0, "spearman": 0.0}
    assert classes([0, 1], [0, 0], 2).scores == {"matthews": 0.0, "f1": 0.0}
