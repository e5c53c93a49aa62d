"""Constraints on the configuration of encoders."""

import pytest

from .trees import config, problems

CLASSIFIER = {"kind": "classifier", "classifier": {"num_classes": 2}, "attention": "softmax"}
MASKED = {"kind": "masked_lm", "attention": "softmax"}


@pytest.mark.parametrize("attention", ["softmax", "linear", "performer", "hedgehog"])
@pytest.mark.parametrize("model", [MASKED, CLASSIFIER], ids=lambda model: model["kind"])
def test_bidirectional_mechanisms_are_valid(model, attention):
    assert not problems(model={**model, "attention": attention})


@pytest.mark.parametrize("attention", ["flurka", "flurka_kernel", "local"])
@pytest.mark.parametrize("model", [MASKED, CLASSIFIER], ids=lambda model: model["kind"])
def test_causal_mechanisms_are_refused_with_alternatives(model, attention):
    found = problems(model={**model, "attention": attention})
    assert list(found) == ["model.attention"]
    assert "looks back only" in found["model.attention"].reason
    assert found["model.attention"].remedy.startswith("take softmax, linear, performer or hedgehog")


def test_the_error_names_the_causal_layer():
    found = problems(model={**MASKED, "attention_pattern": ["main", "linear", "local"]})
    assert list(found) == ["model.attention_pattern.2"]
    assert not problems(model={**MASKED, "attention": "flurka", "attention_pattern": ["linear", "softmax"]})


def test_only_classifiers_have_a_classifier_section():
    assert problems(model={"kind": "classifier"})["model.classifier"].remedy.startswith(
        "add classifier: {num_cl"
    )
    refused = problems(model={**MASKED, "classifier": {"num_classes": 2}})["model.classifier"]
    assert refused.remedy == "remove it or take kind: classifier"
    assert "model.classifier.num_classes" in problems(model={**CLASSIFIER, "classifier": {}})
    assert "model.classifier.num_classes" in problems(model={**CLASSIFIER, "classifier": {"num_classes": 0}})


def test_regression_with_pipeline_parallelism_is_refused():
    number = {**CLASSIFIER, "classifier": {"num_classes": 1}}
    assert not problems(model=number)
    found = problems(model=number, parallel={"pipeline": 2})
    assert found["parallel.pipeline"].remedy == "set it to 1, or model.classifier.num_classes to 2 or more"
    assert not problems(model=CLASSIFIER, parallel={"pipeline": 2})


def test_layers_that_share_e_and_f_are_whole_and_in_one_process():
    linformer, flurka = (
        {"preset": preset, "compression": {"rank": 8, "share_layers": True}}
        for preset in ("linformer", "flurka_rnn")
    )
    model = {**MASKED, "attention_pattern": [linformer, flurka, "softmax"], "num_layers": 3}

    def found(**sections):
        return problems(**{"model": model, "data": {"isolate_documents": False}, **sections})

    assert not found()
    assert found(parallel={"pipeline": 2})["parallel.pipeline"].remedy.startswith("set 1")
    assert found(parallel={"zero_stage": 3})["parallel.zero_stage"].remedy.startswith("set 2")
    alone = found(model={**model, "attention_pattern": [linformer, "softmax", "softmax"]})
    key = "model.attention_pattern.0.compression.share_layers"
    assert "no other layer has this compression" in alone[key].reason


def test_only_masked_language_models_have_a_masking_section():
    assert problems(data={"masking": {"rate": 0.2}})["data.masking"].remedy.startswith(
        "remove it or take model.kind"
    )
    masking = config(model=MASKED, data={"masking": {"rate": 0.2}}).data.masking
    assert (masking.rate, masking.mask_share, masking.random_share) == (0.2, 0.8, 0.1)


@pytest.mark.parametrize(
    ("masking", "key", "remedy"),
    [
        ({"rate": 0.0}, "rate", "change it"),
        ({"mask_share": 0.95}, "random_share", "set at most 0.05"),
        ({"ratio": 0.2}, "ratio", "did you mean rate?"),
    ],
)
def test_invalid_masking_rates_are_refused(masking, key, remedy):
    found = problems(model=MASKED, data={"masking": masking})
    assert found[f"data.masking.{key}"].remedy.startswith(remedy)


def test_only_unpadded_encoders_support_context_parallelism():
    shards = {"parallel": {"context": 2}}
    assert not problems(model=MASKED, **shards)
    padded = problems(model=CLASSIFIER, **shards)["parallel.context"]
    assert "pads and pools as a whole" in padded.reason
    assert padded.remedy.startswith("set 1")


@pytest.mark.parametrize(
    "attention",
    [
        "linear",
        "performer",
        "eva",
        "flurka_eva",
        "skyformer",
        "nystromformer",
        "bigbird",
        "informer",
        "reformer",
    ],
)
def test_masked_language_models_of_every_mechanism_support_context_parallelism(attention):
    model, data = (
        {**MASKED, "attention": attention},
        {"isolate_documents": attention in ("linear", "performer")},
    )
    assert not problems(model=model, data=data, parallel={"context": 2})


@pytest.mark.parametrize("attention", ["gaussian", "mgk", "eva", "flurka_eva", "skyformer", "nystromformer"])
def test_exchanging_heads_needs_heads_that_divide_over_context_ranks(attention):
    model = {**MASKED, "attention": "linear", "attention_pattern": ["main", attention]}
    model |= {"num_heads": 8, "hidden_size": 64}
    data, training = {"isolate_documents": False}, {"seq_len": 960}
    refused = problems(model=model, data=data, training=training, parallel={"context": 3})["parallel.context"]
    assert "does not divide the 8 heads of a tensor rank" in refused.reason
    assert "model.attention_pattern.1" in refused.reason
    assert refused.remedy == "set a divisor of the heads, or take similarity: kernel"
    assert not problems(model=model, data=data, training=training, parallel={"context": 4})


def test_only_causal_layers_need_whole_blocks_per_context_rank():
    layout = {"parallel": {"context": 2}, "training": {"seq_len": 96}, "data": {"isolate_documents": False}}
    assert not problems(model={**MASKED, "attention": "eva"}, **layout)
    assert (
        "whole blocks of 64 tokens"
        in problems(model={"attention": "eva"}, **layout)["training.seq_len"].reason
    )


def test_only_learned_positions_have_max_positions():
    assert not problems(model={**MASKED, "position": "sinusoidal"})
    assert "model.max_positions" in problems(model={**MASKED, "position": "sinusoidal", "max_positions": 512})


def test_an_encoder_with_eva_cannot_isolate_documents():
    found = problems(model={"attention": "eva", "kind": "masked_lm"})
    assert "divides a sequence, not its documents" in str(found["data.isolate_documents"])
    assert not problems(model={"attention": "eva", "kind": "masked_lm"}, data={"isolate_documents": False})
