"""Models that are looked at and not trained, cut over the ranks as a run is."""

from dataclasses import replace

import torch

from megakernel.config import Model, UserError
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import Mesh
from megakernel.training.cut import cuts
from megakernel.training.optimizer import is_new
from megakernel.training.universal_load import compare, load_weights, whole_shapes
from megakernel.training.weight_source import WeightSource


def frozen_model(
    settings: ModelSettings, model: Model, source: WeightSource, dtype: torch.dtype
) -> LanguageModel:
    """`model` with the weights of `source`, in evaluation mode and without gradients.

    settings: of the run; its ranks, seed and chunks hold. What an attention mechanism owns stays as it was drawn
    where the source does not have it.
    Raises UserError where another weight is missing or has another shape.
    """
    own = replace(settings, model=model, recompute="none", offload=False, mlp_chunk_size=None, lora=None)
    made, mesh = LanguageModel(own), settings.mesh
    assert isinstance(mesh, Mesh)
    tp, tensors = mesh.tp, source.tensors(model)
    shares = cuts(made)
    found = compare(whole_shapes(made, shares, tp), tensors)
    lost = [name for name in found.missing if not is_new(name)]
    wrong = [*found.misshapen, *(f"{name} is not in the checkpoint" for name in lost)]
    if wrong:
        remedy = (
            "take one of the same sizes, tokenizer and vocabulary (model.vocab_size, model.vocab_multiple)"
        )
        raise UserError("\n".join(f"{source.key}={source.folder}: {line}; {remedy}" for line in wrong))
    load_weights(made, shares, tp, tensors, found.common)
    return made.to(mesh.device, dtype).requires_grad_(False).eval()
