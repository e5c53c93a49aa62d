"""Predictions of a classifier or a regression, and their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.loader import ValidationBatches
from megakernel.model import LanguageModel

from .voting import each_draw, vote_scores


@dataclass(frozen=True)
class ExamplePredictions:
    """Labels and outputs of examples, in order."""

    labels: Tensor
    """(examples,) int64 class indices, or float32 numbers."""

    outputs: Tensor
    """Log-probabilities (examples, classes), or predicted numbers (examples, 1)."""

    vote: dict[str, float | None] | None = None
    """The scores of `vote_scores`, of classes predicted over draws."""

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted."""
        return self.labels.is_floating_point()

    @property
    def predicted(self) -> Tensor:
        """(examples,): the most probable class, or the predicted number."""
        return self.outputs.squeeze(-1) if self.is_regression else self.outputs.argmax(-1)

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats, or mean squared error."""
        if self.is_regression:
            return F.mse_loss(self.predicted.double(), self.labels.double()).item()
        return F.nll_loss(self.outputs.double(), self.labels).item()

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions; None for a regression."""
        return None if self.is_regression else (self.predicted == self.labels).double().mean().item()

    @property
    def scores(self) -> dict[str, float]:
        """The scores of GLUE's tables: Matthews' correlation, for two classes F1; for numbers Pearson's and Spearman's.

        F1 is that of class 1. A correlation of constant values is 0, as in Matthews' definition.
        """
        if self.is_regression:
            labels, predicted = self.labels.double(), self.predicted.double()
            return {
                "pearson": _correlation(labels, predicted),
                "spearman": _correlation(_ranks(labels), _ranks(predicted)),
            }
        counts = torch.zeros(2 * (self.outputs.shape[-1],), dtype=torch.float64)
        counts.index_put_((self.labels, self.predicted), torch.ones(()).double(), accumulate=True)
        scores = {"matthews": _matthews(counts)}
        if len(counts) == 2:
            wrong = counts[0, 1] + counts[1, 0]
            scores["f1"] = _ratio(2 * counts[1, 1], 2 * counts[1, 1] + wrong)
        return scores


def _ratio(value: Tensor, of: Tensor) -> float:
    return (value / of).item() if of != 0 else 0.0


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two float64 vectors: 0 if one is constant, NaN if one holds NaN."""
    if (x == x[:1]).all() or (y == y[:1]).all():
        return 0.0
    return torch.corrcoef(torch.stack((x, y)))[0, 1].item()


def _ranks(x: Tensor) -> Tensor:
    """The ranks of numbers from the smallest on, as float64; equal numbers share the mean of theirs. NaN stays NaN."""
    _, place, count = x.unique(return_inverse=True, return_counts=True)
    ranks = count.cumsum(0) - (count - 1) / 2.0
    return ranks.double()[place].masked_fill(x.isnan(), torch.nan)


def _matthews(counts: Tensor) -> float:
    """Matthews' correlation, for any number of classes, of counts (true class, predicted class) in float64.

    Gorodkin, Comparing two K-category assignments by a K-category correlation coefficient, 2004, eq. 8.
    """
    true, predicted, total = counts.sum(1), counts.sum(0), counts.sum()
    covariance = counts.trace() * total - true @ predicted
    return _ratio(covariance, ((total**2 - true @ true) * (total**2 - predicted @ predicted)).sqrt())


@torch.no_grad()
def predict_examples(
    model: LanguageModel,
    batches: ValidationBatches,
    device: torch.device,
    progress: Callable[[int, int], None],
    draws: int | None = None,
) -> ExamplePredictions:
    """The predictions of all batches.

    model: in evaluation mode. progress: called after each batch with the batches done and all batches.
    draws: number of draws of the noise that training redraws, over which class probabilities, or predicted numbers, are
    averaged, and over which classes vote; None: the current noise.
    """
    labels, outputs, likeliest, logs = [], [], [], []
    for done, batch in enumerate(batches, start=1):
        tokens, positions, counted = batch.tokens.to(device), batch.positions.to(device), batch.loss_mask
        targets = batch.labels[counted]
        labels.append(targets)
        is_regression = targets.is_floating_point()
        predict = partial(model.outputs if is_regression else model.log_probabilities, tokens, positions)
        if draws is None:
            outputs.append(predict().cpu()[counted])
        else:
            found = torch.stack([drawn.cpu()[counted] for drawn in each_draw(model, predict, draws)])
            if is_regression:
                outputs.append(found.mean(0))
            else:
                outputs.append(found.double().exp().mean(0).log())
                likeliest.append(found.argmax(-1))
                logs.append(found[:, range(len(targets)), targets].double())
        progress(done, len(batches))
    vote = vote_scores(torch.cat(labels), torch.cat(likeliest, 1), torch.cat(logs, 1)) if likeliest else None
    return ExamplePredictions(torch.cat(labels), torch.cat(outputs), vote)
