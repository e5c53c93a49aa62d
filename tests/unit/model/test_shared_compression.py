"""Linformer's layerwise sharing: layers of one compression use the E and F of the first of them."""

from copy import deepcopy

import pytest
import torch

from megakernel.config import Model
from megakernel.model import LanguageModel, ModelSettings
from megakernel.model.parameters import parameter_count
from megakernel.parallel import OneProcess

VOCAB, TOKENS = 64, 24
SHARED = {"compression": {"rank": 4, "share_layers": True}}
OWN = {"compression": {"rank": 4}}
SIZES = {"kind": "masked_lm", "num_layers": 4, "hidden_size": 32, "num_heads": 4, "max_positions": TOKENS}
NAME = "self_attention.core.compressor.matrices"


def section(options: dict) -> Model:
    """Four layers of both parents' low-rank parts: Linformer, FLuRKA, softmax without E, FLuRKA."""
    kinds = [{"preset": preset, **options} for preset in ("linformer", "flurka_rnn")]
    return Model.model_validate({**SIZES, "attention_pattern": [*kinds, "softmax", kinds[1]]})


def build(options: dict) -> LanguageModel:
    return LanguageModel(
        ModelSettings(section(options), vocab_size=VOCAB, mesh=OneProcess(), isolate_documents=False)
    ).double()


def loss(model: LanguageModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCAB, (2, TOKENS), generator=generator) for _ in range(2))
    positions = torch.arange(TOKENS).expand(2, -1)
    return model(tokens, positions, labels, torch.tensor([[2 * TOKENS], [2 * TOKENS]])).sum()


def test_layers_with_one_e_compute_as_layers_with_equal_ones_and_its_gradient_is_their_sum():
    shared, apart = build(SHARED), build(OWN)
    weights = shared.state_dict()
    assert [name for name in weights if name.endswith(NAME)] == [f"1.{NAME}"]
    equal = {f"{layer}.{NAME}": weights[f"1.{NAME}"].clone() for layer in (2, 4)}
    apart.load_state_dict({**weights, **equal})
    losses = [loss(model) for model in (shared, apart)]
    assert torch.equal(*losses)
    for one in losses:
        one.backward()
    gradients = dict(apart.named_parameters())
    expected = sum(gradients[f"{layer}.{NAME}"].grad for layer in (1, 2, 4))
    found = shared.get_parameter(f"1.{NAME}").grad
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [SHARED, OWN], ids=["shared", "own"])
def test_parameters_are_counted_once(options):
    counted = parameter_count(section(options), VOCAB, TOKENS)
    assert counted == sum(x.numel() for x in build(options).parameters())


def test_a_copy_of_a_model_shares_its_own_matrices():
    model = build(SHARED)
    copied = deepcopy(model)
    before = loss(model)
    with torch.no_grad():
        copied.get_parameter(f"1.{NAME}").mul_(2)
    assert torch.equal(loss(model), before)
    with torch.no_grad():
        model.get_parameter(f"1.{NAME}").mul_(2)
    assert torch.equal(loss(model), loss(copied))
    assert not torch.equal(loss(model), before)


def test_layers_of_another_rank_have_their_own():
    other = {"preset": "linformer", "compression": {"rank": 2, "share_layers": True}}
    kinds = [{"preset": "linformer", **SHARED}, other]
    model = Model.model_validate({**SIZES, "attention_pattern": kinds})
    names = LanguageModel(ModelSettings(model, vocab_size=VOCAB, mesh=OneProcess())).state_dict()
    assert [name for name in names if name.endswith(NAME)] == [f"1.{NAME}", f"2.{NAME}"]
