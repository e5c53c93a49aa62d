"""What a model says of some of a row's tokens."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.model import LanguageModel


class Predictions(NamedTuple):
    """One entry for each chosen place, rows one after the other; on the CPU."""

    losses: Tensor
    """(K,) float32: cross entropy of the label in nats, over all words as in training."""

    right: Tensor
    """(K,) bool: whether the label is the likeliest id of the vocabulary."""


@torch.no_grad()
def predict(
    model: LanguageModel,
    vocab_size: int,
    tokens: Tensor,
    positions: Tensor,
    labels: Tensor,
    chosen: Tensor,
) -> Predictions:
    """The predictions of `labels` at the places `chosen`; all (B, N), logits of some places at a time.

    vocab_size: ids of the tokenizer; the model may have more words, which are no answer.
    """
    hidden = model.hidden(tokens, positions).transpose(0, 1)[chosen]
    wanted = labels[chosen]
    losses, right = [], []
    size = model.settings.loss_chunk_size
    for some, label in zip(hidden.split(size), wanted.split(size)):
        logits = model.logits(some[:, None])[0].float()
        losses.append(F.cross_entropy(logits, label, reduction="none"))
        right.append(logits[:, :vocab_size].argmax(-1) == label)
    return Predictions(torch.cat(losses).cpu(), torch.cat(right).cpu())
