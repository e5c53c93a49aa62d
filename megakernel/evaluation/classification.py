"""How often a classifier is right."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from data_pipeline.loader import ValidationBatches
from megakernel.model import IGNORED, LanguageModel

from .voting import log_vote


@torch.no_grad()
def measure_examples(
    model: LanguageModel,
    batches: ValidationBatches,
    device: torch.device,
    progress: Callable[[int, int], None],
    draws: int | None = None,
) -> tuple[int, float, float]:
    """Examples, their mean cross entropy in nats, and the share whose class is found.

    model: in evaluation mode. progress: called after each batch with the batches done and all batches.
    draws: of the noise that training redraws; a class's probability is the mean over them. None: what is held.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for done, batch in enumerate(batches, start=1):
        tokens, positions = batch.tokens.to(device), batch.positions.to(device)
        classes = log_vote(model, partial(model.log_probabilities, tokens, positions), draws).cpu()
        labels = batch.labels.where(batch.loss_mask, IGNORED)
        loss = F.nll_loss(classes, labels, ignore_index=IGNORED, reduction="sum")
        # No class is IGNORED, so what does not count is never right.
        sums += torch.stack([loss, (classes.argmax(-1) == labels).sum()])
        progress(done, len(batches))
    loss, right = (sums / batches.samples).tolist()
    return batches.samples, loss, right
