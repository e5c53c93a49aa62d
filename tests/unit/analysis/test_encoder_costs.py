"""What encoders cost: the formulas by hand. tests/unit/model holds the parameters against the built model."""

import pytest

from megakernel.config import Model
from megakernel.model.flops import flops_per_token, forward_flops

SIZES = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "attention": "softmax"}
CAUSAL = Model(**SIZES)
MASKED = Model(kind="masked_lm", **SIZES)
CLASSIFIER = Model(kind="classifier", classifier={"num_classes": 3}, **SIZES)


def test_a_token_of_an_encoder_attends_every_other():
    assert forward_flops(CAUSAL, 9, 50)["near"] == 2 * 4 * 5 * 4 * 16
    assert forward_flops(MASKED, 9, 50)["near"] == 2 * 4 * 9 * 4 * 16


def test_only_hidden_tokens_need_logits_and_a_classifier_none():
    head = 2 * 64 * 50
    assert flops_per_token(MASKED, 9, 50) - flops_per_token(MASKED, 9, 50, predicted=0.15) == pytest.approx(
        0.85 * head
    )
    assert forward_flops(CLASSIFIER, 9, 50)["head"] == 0
