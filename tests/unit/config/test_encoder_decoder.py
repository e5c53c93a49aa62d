"""Constraints on the configuration of encoder-decoders."""

import pytest
import yaml

from megakernel.config import ConfigError, load
from megakernel.config.section import merged

from .trees import SMALLEST, config, problems

MODEL = {"kind": "encoder_decoder", "encoder": {"num_layers": 2}, "attention": "softmax"}


def test_an_encoder_belongs_to_an_encoder_decoder_alone():
    assert not problems(model=MODEL)
    missing = problems(model={"kind": "encoder_decoder", "attention": "softmax"})["model.encoder"]
    assert missing.remedy.startswith("add encoder: {num_layers: 2}")
    refused = problems(model={"attention": "softmax", "encoder": {"num_layers": 2}})["model.encoder"]
    assert refused.remedy == "remove it or take kind: encoder_decoder"


def test_layers_of_the_encoder_come_first_and_see_later_tokens():
    pattern = {"attention_pattern": ["local", "softmax"], "num_layers": 3}
    model = config(model={**MODEL, **pattern, "encoder": {"num_layers": 2, "attention": "linear"}}).model
    names = [layer.spec.name for layer in model.attentions]
    assert names == ["kernel", "kernel", "softmax", "softmax", "softmax"]
    assert [layer.near is not None for layer in model.attentions] == [False, False, True, False, True]
    assert [model.is_causal_layer(layer) for layer in range(5)] == [False, False, True, True, True]


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"encoder": {"num_layers": 2, "attention": "flurka"}}, "model.encoder.attention"),
        ({"encoder": {"num_layers": 2, "attention": "local"}}, "model.encoder.attention"),
        ({"attention": "flurka_performer"}, "model.attention"),
        ({"attention_pattern": ["main", "linformer"]}, "model.attention_pattern.1"),
        ({"encoder": {"num_layers": 2, "cross_attention": "flurka"}}, "model.encoder.cross_attention"),
        ({"encoder": {"num_layers": 2, "cross_attention": "mgk"}}, "model.encoder.cross_attention"),
        ({"encoder": {"num_layers": 2, "cross_attention": {"preset": "softmax", "window": 8}}},
         "model.encoder.cross_attention"),
        ({"encoder": {"num_layers": 2, "cross_attention": {"preset": "linear", "output_norm": True}}},
         "model.encoder.cross_attention.output_norm"),
        ({"encoder": {"num_layers": 2, "cross_attention": {"preset": "fastfood_rks", "feature_map": {"samples": 3}}}},
         "model.encoder.cross_attention.feature_map.samples"),
        ({"parallel_residual": True}, "model.parallel_residual"),
        ({"normalized_residual": True}, "model.normalized_residual"),
    ],
)  # fmt: skip
def test_a_part_that_one_of_the_stacks_cannot_have_is_refused_by_its_key(parts, key):
    assert list(problems(model={**MODEL, **parts})) == [key]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"parallel": {"pipeline": 2}}, "parallel.pipeline"),
        ({"parallel": {"context": 2}}, "parallel.context"),
        ({"parallel": {"tensor": 2}, "model": {**MODEL, "num_heads": 2, "num_kv_heads": 1}}, "parallel.tensor"),
        ({"objective": {"kind": "distill", "teacher": "x"}}, "objective.kind"),
        ({"objective": {"kind": "transfer", "teacher": "x"}}, "objective.kind"),
        ({"optimizer": {"trained": "lora"}, "init": {"from": "x"}}, "optimizer.trained"),
        ({"training": {"compile": "layer"}}, "training.compile"),
        ({"logging": {"analysis_every": 5}}, "logging.analysis_every"),
        ({"logging": {"sample_prompt": "x"}}, "logging.sample_prompt"),
        ({"data": {"masking": {}}}, "data.masking"),
        ({"data": {"scored": "answers"}}, "data.scored"),
    ],
)  # fmt: skip
def test_what_knows_one_sequence_alone_is_refused(sections, key):
    assert key in problems(**{"model": MODEL, **sections})


def test_up_training_is_refused():
    tree = {"init": {"from": "x"}, "uptrain": {"transfer": None, "distill": {"kl": 0.0}}}
    assert "uptrain" in problems(model={**MODEL, "attention": "flurka"}, **tree)


def test_a_sample_is_two_sequences():
    model = config(model=MODEL).model
    assert (model.sequences_per_sample, model.special_ids) == (2, 0)


@pytest.mark.parametrize(
    "model", [MODEL, {"kind": "classifier", "classifier": {"num_classes": 2, "documents": 2}}]
)
def test_tokens_of_two_sequences_are_not_turned_into_steps(model, tmp_path):
    """The steps would follow from one sequence of each sample, and read twice the tokens that were asked for."""
    stages = [{"from_tokens": 8192, "train": "data/y"}]
    found = problems(model=model, data={"stages": stages})
    assert found["data.stages.0.from_tokens"].remedy == "set from_step"
    tree = merged(SMALLEST, {"model": model, "training": {"steps": None, "tokens": 1_000_000}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(
        ConfigError, match=r"training\.tokens=1000000 is turned into steps by one .* two; set training"
    ):
        load(tmp_path / "run.yaml")


def test_cross_attention_is_a_mechanism_that_can_be_trained_alone():
    trained = {"optimizer": {"trained": "mechanism"}, "init": {"from": "x"}}
    assert "optimizer.trained" in problems(model=MODEL, **trained)
    hedgehog = {**MODEL, "encoder": {"num_layers": 2, "cross_attention": "hedgehog"}}
    assert not problems(model=hedgehog, **trained)
