import pickle

import pytest

from megakernel.config import PRESETS, Attention, ConfigError, Data, UserError, load
from megakernel.config.errors import nearest_first

from . import trees
from .trees import problems


def test_all_problems_of_a_file_are_reported_at_once_one_line_each(tmp_path):
    path = trees.file(
        tmp_path,
        run={"name": "../x", "sed": 3},
        modle={"x": 1},
        data={"train": []},
        training={"steps": 0, "dtype": "fp16", "micro_batch_size": 3},
        parallel={"tensor": 3},
        schedule={"warmup_steps": 1.5},
        deepspeed={"train_batch_size": 4},
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert {problem.key for problem in caught.value.problems} == {
        "run.name",
        "run.sed",
        "modle",
        "data.train",
        "training.steps",
        "training.dtype",
        "model.num_heads",
        "model.vocab_multiple",
        "schedule.warmup_steps",
        "deepspeed.train_batch_size",
    }
    assert len(str(caught.value).splitlines()) == len(caught.value.problems)
    assert all(problem.reason and problem.remedy for problem in caught.value.problems)


def test_a_configuration_error_can_be_pickled():
    with pytest.raises(ConfigError) as caught:
        trees.config(modle={"x": 1}, training={"steps": 0})
    unpickled = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(unpickled, UserError)
    assert str(unpickled) == str(caught.value)


@pytest.mark.parametrize(
    ("sections", "key", "remedy"),
    [
        ({"training": {"step": 3}}, "training.step", "did you mean steps?"),
        ({"modle": {}}, "modle", "did you mean model?"),
        ({"training": {"lr": 3}}, "training.lr", "did you mean optimizer.lr?"),
        ({"model": {"attention": {"nea": {}}}}, "model.attention.nea", "did you mean near?"),
        ({"model": {"attention_pattern": ["main", {"near": {"block": 1}}]}},
         "model.attention_pattern.1.near.block", "did you mean blocks?"),
        ({"data": {"train": [{"path": "x", "wieght": 2}]}}, "data.train.0.wieght", "did you mean weight?"),
        ({"checkpoint": {"zzz": 1}}, "checkpoint.zzz", "known here: every, keep, keep_every, async_save"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest_known_one(sections, key, remedy):
    assert problems(**sections)[key].remedy == remedy


@pytest.mark.parametrize(
    ("sections", "key", "line"),
    [
        ({"training": {"steps": 0}}, "training.steps",
         "training.steps=0 should be greater than 0; change it (Optimizer steps of the whole run)"),
        ({"training": {"dtype": "fp32"}}, "training.dtype",
         "training.dtype=fp32 is none of the choices; choose float32, bfloat16"),
        ({"run": {"name": 3}}, "run.name",
         "run.name=3 should be text; write it in quotes (Name of the run and of its folder under run.root)"),
        ({"training": 3}, "training", "training=3 should be a mapping of keys; write its keys below it"),
        ({"model": {"attention": "flurk"}}, "model.attention",
         "model.attention=flurk is not an attention preset; "
         f"choose {nearest_first('flurk', PRESETS)}"),
        ({"data": {"train": [{"weight": 2}]}}, "data.train.0.path",
         "data.train.0.path is missing; add it (Folder that contains manifest.json, or the prefix of Megatron's token "
         "files)"),
    ],
)  # fmt: skip
def test_an_error_line_has_key_value_reason_and_remedy(sections, key, line):
    assert str(problems(**sections)[key]) == line


def test_a_missing_section_is_reported_by_its_keys():
    with pytest.raises(ConfigError) as caught:
        trees.validate({})
    assert {"run.name", "model.num_layers", "data.train", "training.steps"} <= {
        p.key for p in caught.value.problems
    }


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"similarity": "kernel"}, "feature_map"),
        ({"feature_map": {"name": "elu"}}, "feature_map"),
        ({"similarity": "gaussian", "compression": {}}, "compression"),
        ({"compression": {"kind": "pool"}, "near": {}}, "compression.kind"),
        ({"compression": {"compress": "input"}, "near": {}}, "compression.compress"),
        ({"compression": {"compress": "input", "per_head": True}}, "compression.compress"),
        ({"compression": {"kind": "linformer"}, "far_rope": "centroid"}, "far_rope"),
        ({"eva": {}}, "eva"),
        ({"similarity": "kernel", "feature_map": {}, "near": {}}, "near"),
        (
            {"similarity": "kernel", "feature_map": {}, "compression": {}, "near": {"block_size": 8}},
            "near.block_size",
        ),
        ({"near": {}}, "near.block_size"),
        ({"near": {"block_size": 8, "kind": "kernel"}}, "near.kind"),
        ({"preset": "selected", "near": {"join": "shared"}}, "near.join"),
        ({"preset": "local", "near": {"gate_bias": 0.0}}, "near.gate_bias"),
        ({"preset": "flurka", "near": {"join": "shared", "gate": "head"}}, "near.gate"),
        ({"preset": "flurka_kernel", "near": {"join": "shared"}}, "near.join"),
        ({"far_rope": "centroid"}, "far_rope"),
        ({"selection": {}}, "selection"),
        ({"similarity": "kernel", "feature_map": {}, "selection": {}}, "selection"),
        ({"preset": "selected", "compression": {"block_size": 8, "rank": 2}}, "selection"),
        ({"preset": "selected", "mixture": {}}, "selection"),
        ({"preset": "selected", "near": {"block_size": 10}}, "selection.landmarks"),
        ({"preset": "selected", "near": {"kind": "kernel"}}, "near.kind"),
        ({"mechanism": "eva", "selection": {}}, "selection"),
        ({"mechanism": "skyformer", "skyformer": {"inverse": "exact", "gamma": 0.2}}, "skyformer.gamma"),
        ({"preset": "bigbird", "bigbird": {"window_blocks": 4}}, "bigbird.window_blocks"),
        ({"preset": "informer", "informer": {"top": 8, "factor": 2}}, "informer.factor"),
        ({"preset": "reformer", "reformer": {"buckets": 7}}, "reformer.buckets"),
        ({"preset": "reformer", "compression": {}}, "compression"),
        ({"similarity": "kernel", "feature_map": {"samples": 8}}, "feature_map.samples"),
        (
            {"similarity": "kernel", "feature_map": {}, "near": {}, "compression": {"rank": 65}},
            "compression.rank",
        ),
    ],
)
def test_invalid_combinations_of_attention_keys_are_refused(tree, key):
    assert f"model.attention.{key}" in problems(model={"attention": tree})


def test_a_section_built_in_python_is_validated_too():
    with pytest.raises(ValueError, match="feature_map=None is missing beside similarity: kernel"):
        Attention(similarity="kernel")


@pytest.mark.parametrize("preset", ["linformer", "flurka_rnn", "flurka_eva"])
def test_landmarks_of_the_whole_sequence_need_an_encoder_without_isolation(preset):
    found = problems(model={"attention": preset})["model.attention"]
    assert "linformer without a near window mixes future tokens" in str(found)
    found = problems(model={"attention": preset, "kind": "masked_lm"})
    assert "model.attention" not in found
    assert "data.isolate_documents" in found
    assert not problems(model={"attention": preset, "kind": "masked_lm"}, data={"isolate_documents": False})


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"qk_norm": True, "kind": "masked_lm", "attention": "linformer"}}, "model.qk_norm"),
        ({"model": {"hidden_size": 130}}, "model.hidden_size"),
        ({"model": {"num_kv_heads": 3}}, "model.num_kv_heads"),
        ({"model": {"head_dim": 31}}, "model.position"),
        ({"model": {"max_positions": 512}}, "model.max_positions"),
        ({"model": {"rope_base": 500, "position": "learned"}}, "model.rope_base"),
        ({"uptrain": {"transfer": {"steps": 1, "cross_entropy": 1}}}, "uptrain.transfer.cross_entropy"),
        (
            {"model": {"position": "none", "attention": {"preset": "flurka", "far_rope": "centroid"}}},
            "model.position",
        ),
        ({"model": {"attention_pattern": []}}, "model.attention_pattern"),
        ({"training": {"micro_batch_size": 3}}, "training.global_batch_size"),
        ({"training": {"skip_samples": [[5, 5]]}}, "training.skip_samples"),
        ({"parallel": {"zero_stage": 2, "pipeline": 2}}, "parallel.zero_stage"),
        ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel"),
        ({"schedule": {"name": "constant", "decay_steps": 5}}, "schedule.decay_steps"),
        ({"schedule": {"min_lr_ratio": 1.5}}, "schedule.min_lr_ratio"),
        ({"checkpoint": {"every": 10, "keep_every": 25}}, "checkpoint.keep_every"),
    ],
)
def test_contradicting_keys_of_one_section_are_refused(sections, key):
    assert key in problems(**sections)


def test_help_texts_in_errors_are_one_line():
    line = str(problems(data={"scored": 3})["data.scored"])
    assert "\n" not in line
    assert all(
        field.description == " ".join(field.description.split()) for field in Data.model_fields.values()
    )


def test_an_error_shows_a_path_as_it_was_written():
    found = problems(objective={"teacher": "runs/dense"})
    assert str(found["objective.teacher"]).startswith("objective.teacher=runs/dense has no effect")
