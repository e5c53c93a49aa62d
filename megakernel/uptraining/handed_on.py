"""Streams through the stages of a model that is looked at and not trained."""

import torch
import torch.distributed as dist

from megakernel.model import LanguageModel
from megakernel.model.stream import Stream
from megakernel.parallel import Mesh


@torch.no_grad()
def before_head(model: LanguageModel, stream: Stream, mesh: Mesh) -> Stream | None:
    """The stream as it enters the head on the last stage, None on the others; called on all of them.

    model: from `frozen_model`. stream: token ids (B, N), positions and whatever else; every stage has it, so the hidden
    states alone are sent. A stage is done with a stream when it has handed it on, and takes the next.
    """
    tokens, *rest = stream
    stages, rank = mesh.pp.ranks, mesh.pp.rank
    if not mesh.is_first_stage:
        batch, length = tokens.shape
        sharded = mesh.tp.size if mesh.sequence_parallel else 1
        sizes = length // sharded, batch, model.settings.model.hidden_size
        hidden = torch.empty(sizes, device=mesh.device, dtype=next(model.parameters()).dtype)
        dist.recv(hidden, stages[rank - 1], group=mesh.pp.group)
        stream = (hidden, *rest)
    stream = model.body(stream)
    if mesh.is_last_stage:
        return stream
    dist.send(stream[0].contiguous(), stages[rank + 1], group=mesh.pp.group)
    return None
