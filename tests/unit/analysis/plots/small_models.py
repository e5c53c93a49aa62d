"""Small models in one process, and inputs for them."""

import torch

from megakernel.config import Model
from megakernel.model import IGNORED, LanguageModel, ModelSettings
from megakernel.parallel import OneProcess

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_multiple": 32}
LENGTH = 24


def small_model(attention, mesh=None, **parts):
    """A model with weights large enough that every part has an effect."""
    config = Model(**{**SIZES, **parts}, attention=attention).model_copy(update={"max_positions": LENGTH})
    settings = ModelSettings(
        config, vocab_size=32, mesh=mesh or OneProcess(), isolate_documents=config.is_causal
    )
    model = LanguageModel(settings).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


def layer_inputs(rows=1, length=LENGTH):
    """Sequences of tokens, the first with two documents; no labels."""
    tokens = torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(length).expand(rows, -1).clone()
    positions[0] = torch.cat([torch.arange(9), torch.arange(length - 9)])
    return tokens, positions, torch.full_like(tokens, IGNORED), torch.ones(1)


def labelled(rows):
    """`layer_inputs` where every other token has a label."""
    tokens, positions, _, _ = layer_inputs(rows)
    labels = tokens.roll(-1, 1)
    labels[:, ::2] = IGNORED
    return tokens, positions, labels, torch.tensor([int((labels != IGNORED).sum())])
