"""Small models with random weights, for tests of generation."""

import torch

from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel import OneProcess

BLOCKS = {"compression": {"block_size": 8, "rank": 2}}
"""Blocks of 8 tokens instead of 64, so that short texts have many."""

FLURKA = {"preset": "flurka", **BLOCKS}
MIXED = [FLURKA, "softmax", "performer", {"preset": "local", "near": {"block_size": 8}}]


def build(mesh=None, vocab_size=64, compiles=False, recompute="none", **parts):
    """A model in evaluation mode."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_multiple": 64}
    mesh = mesh or OneProcess()
    how = {"compile": compiles, "recompute": recompute}
    settings = ModelSettings(Model(**sizes | parts), vocab_size=vocab_size, mesh=mesh, seed=3, **how)
    return with_random_weights(LanguageModel(settings).eval())


@torch.no_grad()
def with_random_weights(model):
    """The model with weights away from initial values at which parts of a mechanism have no effect."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model
