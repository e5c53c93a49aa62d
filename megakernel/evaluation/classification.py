"""How often a classifier is right."""

from collections.abc import Callable

import torch

from data_pipeline.loader import ValidationBatches
from megakernel.model import IGNORED, LanguageModel


@torch.no_grad()
def measure_examples(
    model: LanguageModel,
    batches: ValidationBatches,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> tuple[int, float, float]:
    """Examples, their mean cross entropy in nats, and the share whose class is found.

    model: in evaluation mode. progress: called after each forward pass with the passes done and all passes.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for done, batch in enumerate(batches, start=1):
        labels = batch.labels.where(batch.loss_mask, IGNORED)
        each = torch.ones(1)  # shares of one example are sums
        stream = (batch.tokens, batch.positions, labels, each)
        sums += model(*(part.to(device) for part in stream)).cpu()
        progress(done, len(batches))
    loss, right = (sums / batches.samples).tolist()
    return batches.samples, loss, right
