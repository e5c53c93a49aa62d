"""The tuple that layers and pipeline stages pass on."""

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from data_pipeline.batch import Batch

LayerInputs: TypeAlias = tuple[Tensor, ...]
"""(x, positions, labels, num_targets), with dropout also numbers, or (x, positions) where no loss is computed.

x: token ids (B, N) before the embedding, hidden states (N, B, C) after it (N / tp tokens under sequence parallelism).
positions (B, N) int64: each token's position in its document, negative for padding. labels int64, per token (B, N),
per example (E,) or, with sources and targets in turn, per token of the targets (B / 2, N), IGNORED where the loss does
not count. num_targets (1,) int64: labels that count in the global batch.
numbers (B, N) int64: random ones of the tokens, of which dropout is a function (`ops.dropout`).
Only x may have gradients, as DeepSpeed's pipeline requires. Pipeline stages with a teacher pass further tensors on:
`Distillation` the teacher's states behind these, `LayerTransfer` the loss so far and these states in place of x.
"""

_NUMBERS = 4
"""Index of `numbers`."""

IGNORED = -100
"""Label of a token or example whose loss does not count."""


def to_layer_inputs(batch: "Batch", targets: Tensor) -> LayerInputs:
    """A batch as LayerInputs, on the device of `targets`, which is num_targets (1,)."""
    # Moved before they are combined: only the batch's own tensors are in pinned memory, where copies need no wait.
    parts = (batch.tokens, batch.positions, batch.labels, batch.loss_mask)
    tokens, positions, labels, counts = (part.to(targets.device, non_blocking=True) for part in parts)
    return tokens, positions, labels.where(counts, IGNORED), targets


def numbers_of(inputs: LayerInputs) -> Tensor | None:
    """The tokens' numbers (B, N) for dropout; None: there is none."""
    return inputs[_NUMBERS] if len(inputs) > _NUMBERS else None


def as_bytes(states: Tensor) -> Tensor:
    """States (…, C) as detached uint8 (…, C x itemsize), for which pipeline stages send no gradient back.

    The inverse is `view(dtype)`.
    """
    return states.detach().contiguous().view(torch.uint8)
