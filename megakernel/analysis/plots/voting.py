"""Inconsistency of predictions under the noise of learned kernels, and the gain of a vote (KL, 4.1, figure 5)."""

from functools import partial

import torch
from torch import Tensor

from megakernel.evaluation.voting import each_draw
from megakernel.model import IGNORED, LanguageModel
from megakernel.model.layer_inputs import LayerInputs

from .subject import Subject
from .table import Row


@torch.no_grad()
def measure(subject: Subject) -> list[Row]:
    """See `vote_rows`, over the labels of all samples."""
    model = subject.model
    found = [
        torch.stack(list(each_draw(model, partial(predictions, model, inputs), subject.draws)))
        for inputs in subject.model_inputs()
    ]
    hits, likeliest, logs = torch.cat(found, -1).unbind(1)
    return vote_rows(hits.bool(), likeliest.long(), logs)


def predictions(model: LanguageModel, inputs: LayerInputs) -> Tensor:
    """(3, T) float64 for the labels that count: whether the likeliest class is right, that class, log p(label)."""
    tokens, positions, labels, _ = inputs
    if model.settings.model.classifier is not None:
        logs, counted = model.log_probabilities(tokens, positions), labels != IGNORED
    else:
        counted = labels != IGNORED
        logs = model.logits(model.hidden(tokens, positions))[counted].float().log_softmax(-1)
        counted = counted[counted]
    targets = labels[labels != IGNORED]
    logs = logs[counted]
    likeliest = logs.argmax(-1)
    of_label = logs.gather(-1, targets[:, None])[:, 0]
    return torch.stack([(likeliest == targets).double(), likeliest.double(), of_label.double()])


def vote_rows(hits: Tensor, likeliest: Tensor, logs: Tensor) -> list[Row]:
    """Of D draws and T predictions (D, T): how good the first 1, 2, 4, ... and all draws are together.

    draws; accuracy: the mean of single draws; voting_accuracy: of what most draws predict (of a tie, one of them);
    gain: their ratio, KL's AGV; inconsistency: share of the draws that differ from what most say, in %, KL's PI;
    deviation: std / |mean| of the label's logit log p / (1 - p) over the draws, the median over predictions, KL's RSD
    (which is a mean); loss: of the mean probability, in nats.
    """
    total = len(hits)
    targets = torch.where(hits, likeliest, -1).amax(0)  # -1: no draw found it, and no vote will
    counts = sorted({*(2**n for n in range(total.bit_length())), total})
    rows: list[Row] = []
    for count in counts:
        voted = likeliest[:count].mode(0).values
        single = hits[:count].double().mean().item()
        voting = (voted == targets).double().mean().item()
        logits = logs[:count] - torch.log1p(-logs[:count].exp()).clamp(min=-700)
        scatter = logits.std(0, correction=0) / logits.mean(0).abs()
        mean_logs = logs[:count].logsumexp(0) - torch.tensor(float(count)).log()
        rows.append(
            {
                "draws": count,
                "accuracy": single,
                "voting_accuracy": voting,
                "gain": voting / single if single else "",
                "inconsistency": 100 * (likeliest[:count] != voted).double().mean().item(),
                "deviation": scatter.median().item(),
                "loss": -mean_logs.mean().item(),
            }
        )
    return rows
