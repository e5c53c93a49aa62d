"""Cross entropy of a model by position, and its predictions at chosen places."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.batch import Batch
from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import inputs_of

from .result import PositionBucket
from .voting import log_vote

STARTS = 2 ** torch.arange(4, 32)
"""First positions of all buckets but the first, which begins at 0: 16, 32, 64, ..."""


class Batches(Protocol):
    """Sequences in forward passes."""

    def __len__(self) -> int:
        """Forward passes."""

    def __iter__(self) -> Iterator[Batch]:
        """The sequences."""


@torch.no_grad()
def measure(
    model: LanguageModel,
    batches: Batches,
    device: torch.device,
    progress: Callable[[int, int], None],
    draws: int | None = None,
) -> list[PositionBucket]:
    """The mean loss of every bucket of positions that holds a prediction.

    progress: called after each batch with the batches done and all batches.
    draws: of the noise that training redraws; a token's probability is the mean over them. None: what is held.
    """
    sums = torch.zeros(len(STARTS) + 1, dtype=torch.float64)
    counts = torch.zeros(len(STARTS) + 1, dtype=torch.int64)
    longest = 0
    for done, batch in enumerate(batches, start=1):
        counted = batch.loss_mask
        num_targets = counted.sum().reshape(1)  # what `losses` has no need of
        inputs = inputs_of(batch, num_targets.to(device))
        logs = log_vote(model, partial(_log_probabilities, model, inputs), draws).cpu()[counted]
        bucket = torch.bucketize(batch.positions[counted], STARTS, right=True)
        # float64 keeps millions of terms exact enough.
        sums += torch.bincount(bucket, weights=-logs.double(), minlength=len(sums))
        counts += torch.bincount(bucket, minlength=len(counts))
        longest = max(longest, int(batch.positions.max()))
        progress(done, len(batches))
    return [
        PositionBucket(first, min(max(2 * first, 16) - 1, longest), tokens, total / tokens)
        for first, tokens, total in zip([0, *STARTS.tolist()], counts.tolist(), sums.tolist())
        if tokens
    ]


def _log_probabilities(model: LanguageModel, inputs: tuple[Tensor, ...]) -> Tensor:
    """Log-probabilities of the labels, (B, N)."""
    return -model.losses(*inputs)


class Predictions(NamedTuple):
    """One entry for each chosen place, sequences one after the other; on the CPU."""

    losses: Tensor
    """(K,) float32: cross entropy of the label in nats, over the whole vocabulary as in training."""

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

    vocab_size: ids of the tokenizer; the model may have more, which are no answer.
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
