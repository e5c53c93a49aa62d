"""Weight decay and learning rate of each parameter group."""

import pytest

from megakernel.config import Model, Optimizer
from megakernel.model import LanguageModel, ModelSettings
from megakernel.parallel.axis import OneProcess
from megakernel.training.optimizer import LR_SCALE, freeze, parameter_groups

MECHANISM = ".core."


@pytest.fixture
def model():
    section = Model(num_layers=1, hidden_size=32, num_heads=4, bias=True, qkv_bias=True, attention="flurka")
    return LanguageModel(ModelSettings(section, vocab_size=64, mesh=OneProcess()))


def groups(model, **settings):
    """For each group: weight decay, learning-rate scale and parameter names."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (group["weight_decay"], group[LR_SCALE], {names[id(parameter)] for parameter in group["params"]})
        for group in parameter_groups(model, Optimizer(weight_decay=0.1, **settings)).values()
    ]


def test_matrices_decay_but_norms_biases_and_mechanisms_do_not(model):
    (decay, scale, decayed), (none, other_scale, free) = groups(model)
    assert (decay, scale, none, other_scale) == (0.1, 1.0, 0.0, 1.0)
    assert decayed >= {"1.self_attention.qkv.weight", "1.mlp.linear_fc1.weight", "1.mlp.linear_fc2.weight"}
    assert free >= {"1.self_attention.qkv.bias", "1.mlp.linear_fc1.bias"}
    assert any("norm" in name for name in free)
    assert not any("norm" in name or "bias" in name or MECHANISM in name for name in decayed)
    assert decayed | free == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_decay_unless_they_are_left_out(tied):
    section = Model(num_layers=1, hidden_size=32, num_heads=4, tie_embeddings=tied, position="learned")
    model = LanguageModel(
        ModelSettings(section.model_copy(update={"max_positions": 16}), vocab_size=64, mesh=OneProcess())
    )
    tokens = "tied_modules.embedding.tokens.weight" if tied else "0.tokens.weight"
    embeddings = {tokens, "1.weight"}
    (_, _, decayed), (_, _, free) = groups(model)
    assert decayed >= embeddings
    (_, _, decayed_without), (none, _, free_without) = groups(model, decay_embeddings=False)
    assert none == 0
    assert decayed - decayed_without == free_without - free == embeddings
    assert decayed_without >= {"2.mlp.linear_fc1.weight"} | (set() if tied else {"4.linear.weight"})


def test_mechanisms_have_their_own_learning_rate(model):
    _, _, (decay, scale, owned) = groups(model, lr=1e-3, mechanism_lr=1e-2)
    assert (decay, scale) == (0.0, pytest.approx(10.0))
    assert owned == {name for name, _ in model.named_parameters() if MECHANISM in name} != set()


def test_frozen_weights_are_in_no_group(model):
    freeze(model, "mechanism")
    [(_, _, trained)] = groups(model)
    assert trained == {name for name, _ in model.named_parameters() if MECHANISM in name}
