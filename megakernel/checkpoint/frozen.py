"""Models that are looked at and not trained, cut over the ranks as a run is."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings, stage_layers
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.self_attention import is_new
from megakernel.parallel import Mesh

from .universal import partitions
from .universal_load import compare, gathered_shapes, load_weights
from .weight_source import WeightSource


def frozen_model(
    settings: ModelSettings,
    model: Model,
    source: WeightSource,
    dtype: torch.dtype,
    part: range | None = None,
) -> LanguageModel:
    """`model` with the weights of `source`, in evaluation mode and without gradients.

    Of a pipeline it is the part that this stage holds. What an attention mechanism owns stays as it was drawn where the
    source does not have it. Called on all ranks. settings: of the run; its ranks, seed and chunks hold. part: places in
    `layer_list`, of which alone weights are read; None: all, of a pipeline those of this stage.
    Raises UserError, alike on all ranks, where another weight is missing or has another shape.
    """
    # Ranks share its words as the run's, with which they are compared.
    model = model.model_copy(update={"vocab_multiple": settings.model.vocab_multiple})
    model = model.for_rows(settings.model.rope_scaling.seq_len)
    own = replace(settings, model=model, recompute="none", offload=False, mlp_chunk_size=None, lora=None)
    mesh = settings.mesh
    assert isinstance(mesh, Mesh)
    made = LanguageModel(own, part or stage_layers(own))
    tp, tensors = mesh.tp, source.tensors(model)
    shares = partitions(made)
    found = compare(gathered_shapes(made, shares, mesh), tensors)
    lost = [name for name in found.missing if not is_new(name)]
    wrong = [*source.other_vocab_size(settings.vocab_size), *found.misshapen]
    wrong += [f"{name} is not in the checkpoint" for name in lost]
    if wrong:
        remedy = (
            "take one of the same sizes, tokenizer and vocabulary (model.vocab_size, model.vocab_multiple)"
        )
        raise UserError("\n".join(f"{source.key}={source.folder}: {line}; {remedy}" for line in wrong))
    load_weights(made, shares, tp, tensors, found.common)
    return made.to(mesh.device, dtype).requires_grad_(False).eval()


@torch.no_grad()
def before_head(model: LanguageModel, inputs: LayerInputs, mesh: Mesh) -> LayerInputs | None:
    """The inputs as they enter the head on the last stage, None on the others; called on all of them.

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
