"""The identity check: a student whose window covers the sequence equals the dense model."""

from types import SimpleNamespace

import pytest
import torch

from megakernel.config import Model
from megakernel.model import IGNORED, LanguageModel, ModelSettings
from megakernel.parallel import OneProcess
from megakernel.uptraining.identity import IDENTITY_TOKENS, covering_model, identity_tokens

SIZES = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "vocab_multiple": 32}
FLURKA = {"preset": "flurka", "compression": {"block_size": 4, "rank": 2}}
WINDOWED = {"similarity": "softmax", "window": 24}


def model(attention, *pattern):
    return Model.model_validate(SIZES | {"attention": attention, "attention_pattern": list(pattern) or None})


def mesh(tp=1, sequence_parallel=False):
    return SimpleNamespace(tp=SimpleNamespace(size=tp), sequence_parallel=sequence_parallel)


def test_identity_tokens_are_limited_and_fit_every_window_of_both_models():
    dense, windowed, student = model("softmax"), model("softmax", "main", WINDOWED, "main"), model(FLURKA)
    assert identity_tokens(dense, student, 1_000_000, mesh()) == IDENTITY_TOKENS
    assert identity_tokens(dense, student, 100, mesh()) == 100
    assert identity_tokens(windowed, student, 1_000_000, mesh()) == 24
    assert identity_tokens(dense, windowed, 1_000_000, mesh()) == 24
    assert identity_tokens(dense, student, 100, mesh(3)) == 100
    assert identity_tokens(dense, student, 100, mesh(3, sequence_parallel=True)) == 99
    assert identity_tokens(model(FLURKA, "softmax", "main", "softmax"), student, 100, mesh()) == 0


@torch.no_grad()
def logits(section, tokens):
    """Logits with equal weights for equal names, scaled so that far tokens matter."""
    language_model = LanguageModel(ModelSettings(section, vocab_size=32, mesh=OneProcess())).double().eval()
    for name, parameter in sorted(language_model.named_parameters()):
        if ".core." not in name:
            draw = torch.Generator().manual_seed(parameter.numel() + len(name))
            parameter += 0.5 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    layer_inputs = (
        tokens,
        torch.arange(tokens.shape[1])[None],
        torch.full_like(tokens, IGNORED),
        torch.ones(1),
    )
    return language_model.logits(language_model.body(layer_inputs)[0])


@pytest.mark.parametrize("length", [24, 3])  # blocks of 4 are longer than 3
def test_the_covering_model_equals_the_dense_model(length):
    tokens = torch.randint(32, (1, length), generator=torch.Generator().manual_seed(0))
    dense = logits(model("softmax", "main", WINDOWED, "main"), tokens)
    student = model(FLURKA, "main", "main", "softmax")
    covered = covering_model(student, model("softmax", "main", WINDOWED, "main"), length)
    assert [covered.layer_attention(layer).block_size for layer in range(3)] == [max(length, 4)] * 2 + [None]
    torch.testing.assert_close(logits(covered, tokens), dense, rtol=1e-10, atol=1e-12)
    if length > 4:
        assert not torch.allclose(logits(student, tokens), dense, atol=1e-3)


@pytest.mark.parametrize("joined", ["gated", "shared"])
def test_the_covering_model_has_one_key_per_token(joined):
    tokens = torch.randint(32, (1, 24), generator=torch.Generator().manual_seed(0))
    student = model({**FLURKA, "near": {"join": joined}, "mixture": {"kind": "shifted"}})
    covered = covering_model(student, model("softmax"), 24)
    torch.testing.assert_close(
        logits(covered, tokens), logits(model("softmax"), tokens), rtol=1e-10, atol=1e-12
    )


def test_the_covering_model_keeps_convolutions_norms_and_gates():
    tokens = torch.randint(32, (1, 24), generator=torch.Generator().manual_seed(0))
    extras = {"short_convolution": 4, "output_norm": True, "output_gate": "silu"}
    dense = model({"preset": "softmax", **extras}, "main", "softmax", "main")
    student = model({**FLURKA, **extras}, "main", {**FLURKA, "short_convolution": 3}, "main")
    covered = covering_model(student, dense, 24)
    torch.testing.assert_close(logits(covered, tokens), logits(dense, tokens), rtol=1e-10, atol=1e-12)
