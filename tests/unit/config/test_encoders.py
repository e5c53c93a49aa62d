"""What encoders are told about their configuration."""

import pytest

from .trees import config, problems

CLASSIFIER = {"kind": "classifier", "classifier": {"num_classes": 2}, "attention": "softmax"}
MASKED = {"kind": "masked_lm", "attention": "softmax"}


@pytest.mark.parametrize("attention", ["softmax", "linear", "performer", "hedgehog"])
@pytest.mark.parametrize("model", [MASKED, CLASSIFIER], ids=lambda model: model["kind"])
def test_mechanisms_that_see_both_ways_are_fine(model, attention):
    assert not problems(model={**model, "attention": attention})


@pytest.mark.parametrize("attention", ["flurka", "flurka_kernel", "local"])
@pytest.mark.parametrize("model", [MASKED, CLASSIFIER], ids=lambda model: model["kind"])
def test_mechanisms_that_look_back_only_are_refused_with_others_to_take(model, attention):
    found = problems(model={**model, "attention": attention})
    assert list(found) == ["model.attention"]
    assert "looks back only" in found["model.attention"].reason
    assert found["model.attention"].remedy.startswith("take softmax, linear, performer or hedgehog")


def test_the_layer_that_looks_back_is_named():
    found = problems(model={**MASKED, "attention_pattern": ["main", "linear", "local"]})
    assert list(found) == ["model.attention_pattern.2"]
    assert not problems(model={**MASKED, "attention": "flurka", "attention_pattern": ["linear", "softmax"]})


def test_a_classifier_needs_its_head_and_others_have_none():
    assert problems(model={"kind": "classifier"})["model.classifier"].remedy.startswith(
        "add classifier: {num_cl"
    )
    refused = problems(model={**MASKED, "classifier": {"num_classes": 2}})["model.classifier"]
    assert refused.remedy == "remove it or take kind: classifier"
    assert "model.classifier.num_classes" in problems(model={**CLASSIFIER, "classifier": {}})
    assert "model.classifier.num_classes" in problems(model={**CLASSIFIER, "classifier": {"num_classes": 1}})


def test_masking_belongs_to_masked_models():
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
def test_shares_that_make_no_sense_are_refused(masking, key, remedy):
    found = problems(model=MASKED, data={"masking": masking})
    assert found[f"data.masking.{key}"].remedy.startswith(remedy)


def test_sequences_are_cut_where_encoders_can_be():
    pieces = {"parallel": {"context": 2}}
    assert not problems(model=MASKED, **pieces)
    padded = problems(model=CLASSIFIER, **pieces)["parallel.context"]
    assert "padded and pooled as a whole" in padded.reason
    assert padded.remedy.startswith("set 1")
    one_way = problems(model={**MASKED, "attention": "linear"}, **pieces)["parallel.context"]
    assert "does not suit model.attention of a masked_lm" in one_way.reason
    assert "or take softmax layers" in one_way.remedy
    assert not problems(model={"attention": "linear"}, **pieces)


def test_only_a_learned_table_has_a_number_of_positions():
    assert not problems(model={**MASKED, "position": "sinusoidal"})
    assert "model.max_positions" in problems(model={**MASKED, "position": "sinusoidal", "max_positions": 512})


def test_an_encoder_with_eva_takes_rows_for_whole_documents():
    found = problems(model={"attention": "eva", "kind": "masked_lm"})
    assert "cuts a row, not its documents" in str(found["data.isolate_documents"])
    assert not problems(model={"attention": "eva", "kind": "masked_lm"}, data={"isolate_documents": False})
