"""What of the data a process of a mesh reads, what layers are called with, and means over the batches of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from data_pipeline.batch import Batch
from data_pipeline.order import Share
from megakernel.model import IGNORED
from megakernel.model.layer_inputs import LayerInputs
from megakernel.parallel import Mesh


def model_inputs(batches: Sequence[Batch], mesh: Mesh) -> list[LayerInputs]:
    """The first layer's input of each micro-batch; all share the number of targets of the whole global batch."""
    own = sum((batch.loss_mask.sum() for batch in batches), start=torch.zeros((), dtype=torch.int64))
    targets = mesh.sum(own.to(mesh.device), mesh.gradient).clamp(min=1).reshape(1)
    found: list[LayerInputs] = []
    for batch in batches:
        labels = batch.labels.where(batch.loss_mask, IGNORED)
        parts = (batch.tokens, batch.positions, labels)
        found.append((*(part.to(mesh.device, non_blocking=True) for part in parts), targets))
    return found


@torch.no_grad()
def means(measure: Callable[..., Tensor], inputs: Sequence[LayerInputs], mesh: Mesh) -> Tensor:
    """The sum over all ranks' inputs of what `measure` makes of each: shares of global means."""
    total = sum(
        (measure(*layer_inputs) for layer_inputs in inputs), start=torch.zeros((), device=mesh.device)
    )
    assert isinstance(total, Tensor)
    return mesh.sum(total, mesh.gradient)


def reading(mesh: Mesh) -> dict[str, Any]:
    """What `TrainingBatches` and `ValidationBatches` are told of this process: its share, and who builds the index."""
    return {
        "share": Share(mesh.dp.rank, mesh.dp.size, mesh.cp.rank, mesh.cp.size),
        "builds_index": mesh.rank == 0,
        "barrier": mesh.barrier,
    }
