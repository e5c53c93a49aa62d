"""Inputs through the stages of a model that is looked at and not trained."""

import torch
import torch.distributed as dist

from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import LayerInputs
from megakernel.parallel import Mesh


@torch.no_grad()
def before_head(model: LanguageModel, inputs: LayerInputs, mesh: Mesh) -> LayerInputs | None:
    """The inputs as it enters the head on the last stage, None on the others; called on all of them.

    model: from `frozen_model`. inputs: token ids (B, N), positions and whatever else; every stage has it, so the hidden
    states alone are sent. A stage is done with inputs when it has handed it on, and takes the next.
    """
    tokens, *rest = inputs
    stages, rank = mesh.pp.ranks, mesh.pp.rank
    if not mesh.is_first_stage:
        batch, length = tokens.shape
        sharded = mesh.tp.size if mesh.sequence_parallel else 1
        sizes = length // sharded, batch, model.settings.model.hidden_size
        hidden = torch.empty(sizes, device=mesh.device, dtype=next(model.parameters()).dtype)
        dist.recv(hidden, stages[rank - 1], group=mesh.pp.group)
        inputs = (hidden, *rest)
    inputs = model.body(inputs)
    if mesh.is_last_stage:
        return inputs
    dist.send(inputs[0].contiguous(), stages[rank + 1], group=mesh.pp.group)
    return None
