"""What flows from layer to layer, within a process and between pipeline stages."""

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from data_pipeline.batch import Batch

LayerInputs: TypeAlias = tuple[Tensor, ...]
"""(x, positions, labels, num_targets).

x is (B, N) token ids before the embedding and (N, B, C) hidden states after it (N / tp tokens under sequence
parallelism). positions (B, N) int64: each token's place in its document, negative where there is no token but padding.
labels int64, for each token (B, N) or for each example (E,), IGNORED where it does not count. num_targets (1,) int64:
labels that count in the whole global batch. Only x carries gradients, which is what DeepSpeed's pipeline sends
backwards.
"""

IGNORED = -100
"""Label of a position whose loss does not count."""


def inputs_of(batch: "Batch", targets: Tensor) -> LayerInputs:
    """A batch as the first layer reads it, on the device of num_targets (1,)."""
    labels = batch.labels.where(batch.loss_mask, IGNORED)
    parts = (batch.tokens, batch.positions, labels)
    return (*(part.to(targets.device, non_blocking=True) for part in parts), targets)


def as_bits(states: Tensor) -> Tensor:
    """States (…, C) as uint8 (…, C x bytes of each): constants, for which a pipeline's stage sends no gradient back."""
    return states.detach().contiguous().view(torch.uint8)


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The states of a dtype that `as_bits` was given."""
    return bits.view(dtype)
