"""Predictions of a classifier or a regression, and their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.loader import ValidationBatches
from megakernel.model import LanguageModel

from .voting import log_vote, mean_over_draws


@dataclass(frozen=True)
class ExamplePredictions:
    """Labels and outputs of examples, in order."""

    labels: Tensor
    """(examples,) int64 class indices, or float32 numbers."""

    outputs: Tensor
    """Log-probabilities (examples, classes), or predicted numbers (examples, 1)."""

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
        from scipy.stats import pearsonr, spearmanr
        from sklearn.metrics import f1_score, matthews_corrcoef

        labels, predicted = self.labels.numpy(), self.predicted.numpy()
        if self.is_regression:
            varies = len(set(labels)) > 1 and len(set(predicted)) > 1
            correlations = {"pearson": pearsonr, "spearman": spearmanr}
            return {
                name: float(function(labels, predicted).statistic) if varies else 0.0
                for name, function in correlations.items()
            }
        scores = {"matthews": float(matthews_corrcoef(labels, predicted))}
        if self.outputs.shape[-1] == 2:
            scores["f1"] = float(f1_score(labels, predicted, zero_division=0.0))
        return scores


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
    averaged; None: the current noise.
    """
    labels, outputs = [], []
    for done, batch in enumerate(batches, start=1):
        tokens, positions = batch.tokens.to(device), batch.positions.to(device)
        if batch.labels.is_floating_point():
            numbers = partial(model.outputs, tokens, positions)
            found = numbers() if draws is None else mean_over_draws(model, numbers, draws)
        else:
            found = log_vote(model, partial(model.log_probabilities, tokens, positions), draws)
        labels.append(batch.labels[batch.loss_mask])
        outputs.append(found.cpu()[batch.loss_mask])
        progress(done, len(batches))
    return ExamplePredictions(torch.cat(labels), torch.cat(outputs))
