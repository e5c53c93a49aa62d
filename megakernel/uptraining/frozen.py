"""Models that are looked at and not trained, cut over the ranks as a run is."""

from dataclasses import replace

import torch

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings, stage_layers
from megakernel.parallel import Mesh
from megakernel.training.optimizer import is_new
from megakernel.training.partition import partitions
from megakernel.training.universal_load import compare, gathered_shapes, load_weights
from megakernel.training.weight_source import WeightSource


def frozen_model(
    settings: ModelSettings, model: Model, source: WeightSource, dtype: torch.dtype
) -> LanguageModel:
    """`model` with the weights of `source`, in evaluation mode and without gradients.

    Of a pipeline it is the part that this stage holds. What an attention mechanism owns stays as it was drawn where the
    source does not have it. Called on all ranks. settings: of the run; its ranks, seed and chunks hold.
    Raises UserError, alike on all ranks, where another weight is missing or has another shape.
    """
    # Ranks share its words as the run's, with which they are compared.
    model = model.model_copy(update={"vocab_multiple": settings.model.vocab_multiple})
    own = replace(settings, model=model, recompute="none", offload=False, mlp_chunk_size=None, lora=None)
    mesh = settings.mesh
    assert isinstance(mesh, Mesh)
    made = LanguageModel(own, stage_layers(own))
    tp, tensors = mesh.tp, source.tensors(model)
    shares = partitions(made)
    found = compare(gathered_shapes(made, shares, mesh), tensors)
    lost = [name for name in found.missing if not is_new(name)]
    wrong = [*source.other_words(settings.vocab_size), *found.misshapen]
    wrong += [f"{name} is not in the checkpoint" for name in lost]
    if wrong:
        remedy = (
            "take one of the same sizes, tokenizer and vocabulary (model.vocab_size, model.vocab_multiple)"
        )
        raise UserError("\n".join(f"{source.key}={source.folder}: {line}; {remedy}" for line in wrong))
    load_weights(made, shares, tp, tensors, found.common)
    return made.to(mesh.device, dtype).requires_grad_(False).eval()
