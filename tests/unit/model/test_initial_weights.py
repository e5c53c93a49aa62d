"""Initial weights as the papers' code has them."""

import pytest
import torch

from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings

SIZES = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "ffn_hidden_size": 128, "activation": "gelu"}
SIZES |= {"kind": "classifier", "classifier": {"num_classes": 3, "head": "mlp"}, "attention": "softmax"}
SIZES |= {"norm": "layernorm", "bias": True, "qkv_bias": True, "position": "learned", "max_positions": 512}


def weights(mesh, **parts):
    model = LanguageModel(ModelSettings(Model.model_validate(SIZES | parts), 500, mesh, seed=3))
    return {name: weight.detach() for name, weight in model.named_parameters() if "norm" not in name}


def assert_uniform(x, bound):
    assert x.abs().max() <= bound
    # The standard deviation of n numbers is off by less than 4 / sqrt(n) of itself.
    assert x.std().item() == pytest.approx(bound / 3**0.5, rel=4 / x.numel() ** 0.5)


def test_uniform_weights_and_biases_are_those_of_torchs_linear_layers(mesh):
    for name, x in weights(mesh, init="uniform").items():
        if "tokens" in name or name == "1.weight":
            assert x.std().item() == pytest.approx(0.02, rel=0.05)
        else:
            inputs = 128 if "linear_fc2" in name else 64
            assert_uniform(x, inputs**-0.5)


def test_xavier_weights_depend_on_the_outputs_of_each_matrix(mesh):
    found = weights(mesh, init="xavier", embedding_init_std=1.0)
    outputs = {
        "qkv.weight": 64,
        "self_attention.output.weight": 64,
        "linear_fc1.weight": 128,
        "linear_fc2.weight": 64,
    }
    for suffix, count in outputs.items():
        (x,) = (x for name, x in found.items() if name.endswith(suffix))
        assert_uniform(x, (6 / (x.shape[1] + count)) ** 0.5)
    assert all(not x.any() for name, x in found.items() if name.endswith("bias"))
    embeddings = [x for name, x in found.items() if "tokens" in name or name == "1.weight"]
    assert len(embeddings) == 2
    for x in embeddings:
        assert x.std().item() == pytest.approx(1, rel=0.05)


def test_weights_are_normal_by_default(mesh):
    found, explicit = weights(mesh), weights(mesh, init="normal", embedding_init_std=0.02)
    assert all(torch.equal(found[name], explicit[name]) for name in found)
