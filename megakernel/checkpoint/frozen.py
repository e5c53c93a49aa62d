"""Frozen models, partitioned over the ranks in the layout of a run."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings, stage_layers
from megakernel.model.layer_inputs import LayerInputs
from megakernel.model.self_attention import absent_in_dense
from megakernel.parallel import Mesh
from megakernel.parallel.ranks import Ranks

from .sharded_load import compare, gathered_shapes, load_weights
from .weight_source import WeightSource
from .whole_tensors import partitions


def frozen_model(
    settings: ModelSettings,
    model: Model,
    source: WeightSource,
    dtype: torch.dtype,
    part: range | None = None,
) -> LanguageModel:
    """`model` with the weights of `source`, in evaluation mode and without gradients; called on all ranks.

    With a pipeline it has only the layers of this stage. Weights of an attention mechanism that the source lacks keep
    their initial values. settings: of the run, whose mesh, seed and chunks are used. part: indices in `layer_list` of
    the layers to build and load; None: all layers, or those of this pipeline stage.
    Raises UserError, alike on all ranks, if any other weight is missing or has another shape.
    """
    # Tensor ranks partition its vocabulary like the run's, with whose logits its own are compared.
    model = model.model_copy(update={"vocab_multiple": settings.model.vocab_multiple})
    model = model.for_seq_len(settings.model.rope_scaling.seq_len)
    settings = replace(settings, model=model, recompute="none", offload=False, lora=None, start=None)
    mesh = settings.mesh
    assert isinstance(mesh, Mesh)
    frozen = LanguageModel(settings, part or stage_layers(settings))
    tp, tensors = mesh.tp, source.tensors(model, Ranks.of(mesh))
    shares = partitions(frozen)
    comparison = compare(gathered_shapes(frozen, shares, mesh), tensors)
    missing = [name for name in comparison.missing if not absent_in_dense(name)]
    wrong = [*source.vocab_size_mismatch(settings.vocab_size), *comparison.misshapen]
    wrong += [f"{name} is not in the checkpoint" for name in missing]
    if wrong:
        remedy = (
            "take one of the same sizes, tokenizer and vocabulary (model.vocab_size, model.vocab_multiple)"
        )
        raise UserError("\n".join(f"{source.key}={source.folder}: {line}; {remedy}" for line in wrong))
    load_weights(frozen, shares, tp, tensors, comparison.common)
    return frozen.to(mesh.device, dtype).requires_grad_(False).eval()


@torch.no_grad()
def head_inputs(model: LanguageModel, inputs: LayerInputs, mesh: Mesh) -> LayerInputs | None:
    """The inputs of the head on the last pipeline stage, None on the others; called on all stages.

    model: from `frozen_model`. inputs: token ids (B, N), positions and others; every stage has them, so only hidden
    states are sent. A stage returns after sending, and can run the next micro-batch while later stages run this one.
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
