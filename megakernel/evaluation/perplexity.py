"""Cross entropy of a model by position, and its predictions at selected tokens."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.batch import Batch
from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import to_layer_inputs

from .result import PositionBucket
from .voting import log_vote

BUCKET_STARTS = 2 ** torch.arange(4, 32)
"""First positions of all buckets but the first, which begins at 0: 16, 32, 64, ..."""


class Batches(Protocol):
    """A sized iterable of batches."""

    def __len__(self) -> int:
        """Number of forward passes."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches."""


@torch.no_grad()
def loss_by_position(
    model: LanguageModel,
    batches: Batches,
    device: torch.device,
    progress: Callable[[int, int], None],
    draws: int | None = None,
) -> list[PositionBucket]:
    """The mean loss of every bucket of positions that has predictions.

    progress: called after each batch with the batches done and all batches. draws: number of draws of the noise that
    training redraws, over which a token's probability is averaged; None: the current noise.
    """
    sums = torch.zeros(len(BUCKET_STARTS) + 1, dtype=torch.float64)
    counts = torch.zeros(len(BUCKET_STARTS) + 1, dtype=torch.int64)
    longest = 0
    for done, batch in enumerate(batches, start=1):
        counted = batch.loss_mask
        num_targets = counted.sum().reshape(1)  # part of the inputs, but not used by `losses`
        inputs = to_layer_inputs(batch, num_targets.to(device))
        logs = log_vote(model, partial(_log_probabilities, model, inputs), draws).cpu()[counted]
        bucket = torch.bucketize(batch.label_positions[counted], BUCKET_STARTS, right=True)
        # Sums of millions of terms need float64.
        sums += torch.bincount(bucket, weights=-logs.double(), minlength=len(sums))
        counts += torch.bincount(bucket, minlength=len(counts))
        longest = max(longest, int(batch.positions.max()))
        progress(done, len(batches))
    return [
        PositionBucket(first, min(max(2 * first, 16) - 1, longest), tokens, total / tokens)
        for first, tokens, total in zip([0, *BUCKET_STARTS.tolist()], counts.tolist(), sums.tolist())
        if tokens
    ]


def _log_probabilities(model: LanguageModel, inputs: tuple[Tensor, ...]) -> Tensor:
    """Log-probabilities of the labels, (B, N)."""
    return -model.losses(*inputs)


class TokenPredictions(NamedTuple):
    """One entry per chosen token, sequence by sequence, on the CPU."""

    losses: Tensor
    """(K,) float32: cross entropy of the label in nats, over the whole vocabulary as in training."""

    right: Tensor
    """(K,) bool: whether the label is the argmax over the tokenizer's ids."""


@torch.no_grad()
def predict(
    model: LanguageModel,
    vocab_size: int,
    tokens: Tensor,
    positions: Tensor,
    labels: Tensor,
    chosen: Tensor,
) -> TokenPredictions:
    """The predictions of `labels` where `chosen`; all (B, N). Logits are computed in chunks of tokens.

    vocab_size: ids of the tokenizer; a model may have more, which cannot be answers.
    """
    hidden = model.hidden(tokens, positions).transpose(0, 1)[chosen]
    targets = labels[chosen]
    losses, right = [], []
    size = model.settings.loss_chunk_size
    for chunk, label in zip(hidden.split(size), targets.split(size)):
        logits = model.logits(chunk[:, None])[0].float()
        losses.append(F.cross_entropy(logits, label, reduction="none"))
        right.append(logits[:, :vocab_size].argmax(-1) == label)
    return TokenPredictions(torch.cat(losses).cpu(), torch.cat(right).cpu())
