"""Scores of predictions against hand-computed values, and against those of scipy 1.17.1 and scikit-learn 1.9.1."""

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


def test_four_classes_have_the_matthews_correlation_of_scikit_learn():
    """From `sklearn.metrics.matthews_corrcoef(labels, predicted)`."""
    found = classes([0, 1, 2, 2, 1, 0, 3, 3, 1, 2], [0, 2, 2, 1, 1, 0, 3, 0, 1, 2], 4)
    assert found.scores == {"matthews": pytest.approx(0.60279628678631, rel=1e-12)}


def test_two_classes_have_the_scores_of_scikit_learn():
    """From `sklearn.metrics.matthews_corrcoef(labels, predicted)` and `f1_score(labels, predicted)`."""
    found = classes([1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1], 2)
    expected = {"matthews": 0.4666666666666667, "f1": 0.7272727272727273}
    assert found.scores == pytest.approx(expected, rel=1e-12)


def test_equal_numbers_share_a_rank_as_in_scipy():
    """From `scipy.stats.pearsonr(labels, predicted).statistic` and `spearmanr(...)`, of float64."""
    found = numbers([3.8, 1.0, 2.5, 2.5, 5.0, 0.0, 2.5, 4.2], [3.1, 1.4, 2.0, 2.6, 4.4, 1.4, 3.3, 3.1])
    # float32, as a model predicts, keeps 7 digits of these numbers; ranks are exact.
    assert found.scores["pearson"] == pytest.approx(0.8994026392359652, rel=1e-6)
    assert found.scores["spearman"] == pytest.approx(0.8395701571521512, rel=1e-12)


def test_numbers_that_are_none_have_no_score():
    scores = numbers([0.0, 1.0, 2.0], [1.0, math.nan, 3.0]).scores
    assert all(map(math.isnan, scores.values()))
