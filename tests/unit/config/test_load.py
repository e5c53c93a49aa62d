import pytest
import yaml

from megakernel.config import Attention, ConfigError, expand_preset, from_yaml, load, to_yaml

from . import trees


def test_the_resolved_text_loads_to_an_equal_configuration(tmp_path):
    changes = [
        "optimizer.clip_grad_norm=.inf",
        "model.attention_pattern=[main, softmax]",
        "training.skip_samples=[[3, 9]]",
    ]
    config = load(
        trees.file(tmp_path),
        [*changes, "data.validation={data/y: 2}", "deepspeed={wall_clock_breakdown: true}"],
    )
    assert from_yaml(to_yaml(config)) == config


def test_a_file_overrides_those_it_extends_in_order(tmp_path):
    trees.file(tmp_path, "base.yaml", training={"steps": 1}, optimizer={"lr": 1.0, "beta1": 0.5})
    (tmp_path / "more").mkdir()
    (tmp_path / "more/lr.yaml").write_text("extends: wd.yaml\noptimizer: {lr: 2.0}")
    (tmp_path / "more/wd.yaml").write_text("optimizer: {lr: 3.0, weight_decay: 0.5}")
    (tmp_path / "run.yaml").write_text("extends: [base.yaml, more/lr.yaml]\ntraining: {steps: 7}")
    config = load(tmp_path / "run.yaml")
    assert config.training.steps == 7
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.weight_decay) == (2.0, 0.5, 0.5)


def test_one_base_may_be_extended_through_several_files(tmp_path):
    trees.file(tmp_path, "base.yaml")
    (tmp_path / "a.yaml").write_text("extends: base.yaml")
    (tmp_path / "run.yaml").write_text("extends: [base.yaml, a.yaml]")
    assert load(tmp_path / "run.yaml") == trees.config()


def test_circular_extends_are_refused_with_their_path(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(ConfigError, match=r"goes in a circle \(a\.yaml -> b\.yaml -> a\.yaml\)"):
        load(tmp_path / "a.yaml")


@pytest.mark.parametrize("extends", ["3", "[1]", "{a: b}", r'"a\0b"'])
def test_extends_takes_only_file_names(tmp_path, extends):
    (tmp_path / "run.yaml").write_text(f"extends: {extends}")
    with pytest.raises(ConfigError, match=r"extends=.* names no files"):
        load(tmp_path / "run.yaml")


def test_a_missing_extended_file_is_named_with_the_file_that_extends_it(tmp_path):
    (tmp_path / "run.yaml").write_text("extends: base.yaml")
    (tmp_path / "base.yaml").write_text("extends: more/gone.yaml")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml")
    assert str(caught.value) == (
        f"extends=more/gone.yaml of {tmp_path}/base.yaml cannot be read (No such file or directory); "
        "name a YAML file, relative to that one"
    )


def test_overrides_apply_to_the_file_in_order(tmp_path):
    config = load(trees.file(tmp_path), ["training.steps=5", "optimizer.lr=1e-4", "training.steps=6"])
    assert (config.training.steps, config.optimizer.lr) == (6, 1e-4)


@pytest.mark.parametrize("attention", ["flurka", {"preset": "flurka"}, None])
def test_one_key_of_a_preset_can_be_changed(tmp_path, attention):
    path = trees.file(tmp_path, model={} if attention is None else {"attention": attention})
    changed = load(path, ["model.attention.near.blocks=2"]).model.attention
    assert changed.near.blocks == 2
    assert changed.compression == load(path).model.attention.compression


@pytest.mark.parametrize("override", ["softmax", "{preset: softmax}", "{similarity: softmax}"])
def test_overriding_the_mechanism_drops_the_keys_of_the_old_one(tmp_path, override):
    attention = load(
        trees.file(tmp_path, model={"attention": "flurka"}), [f"model.attention={override}"]
    ).model.attention
    assert attention.is_plain_softmax


def test_overriding_the_similarity_alone_keeps_the_other_keys_and_names_those_that_contradict_it(tmp_path):
    path = trees.file(tmp_path, model={"attention": {"preset": "flurka", "compression": {"rank": 4}}})
    with pytest.raises(
        ConfigError, match=r"^model\.attention\.feature_map=.* no effect on similarity: softmax"
    ):
        load(path, ["model.attention.similarity=softmax"])
    changes = ["similarity=softmax", "feature_map=null", "near.join=shared"]
    attention = load(path, [f"model.attention.{change}" for change in changes]).model.attention
    assert (attention.compression.rank, attention.near.join) == (4, "shared")


def test_overriding_corpora_replaces_them_all(tmp_path):
    path = trees.file(tmp_path, data={"train": {"data/a": 1.0, "data/b": 2.0}})
    assert [str(corpus.path) for corpus in load(path, ["data.train={data/c: 1}"]).data.train] == ["data/c"]


@pytest.mark.parametrize(
    "attention", ["{preset: softmax}", "{similarity: softmax}", "{mechanism: simple_gla}"]
)
def test_an_attention_of_its_own_replaces_that_of_the_file(tmp_path, attention):
    path = trees.file(tmp_path, model={"attention": {"preset": "flurka", "near": {"gate_bias": 1.0}}})
    found = load(path, [f"model.attention={attention}"]).model.attention
    assert found == Attention.model_validate(expand_preset(yaml.safe_load(attention)))


def test_all_invalid_overrides_are_named(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(
            trees.file(tmp_path), ["steps", "training..steps=3", "training.steps=[", "model.attention=flurk"]
        )
    keys_and_values = [(problem.key, problem.value) for problem in caught.value.problems]
    assert keys_and_values[:2] == [("", "steps"), ("", "training..steps=3")]
    assert keys_and_values[2][0].startswith("training.steps")


def test_environment_variables_are_substituted_and_typed(tmp_path):
    path = trees.file(
        tmp_path,
        run={"root": "${SCRATCH}/runs"},
        training={"steps": "${STEPS}", "eval_every": "${EVERY:-null}"},
        parallel={"sequence_parallel": "${SP:-false}"},
    )
    config = load(path, env={"SCRATCH": "/scratch", "STEPS": "12"})
    assert str(config.run.root) == "/scratch/runs"
    assert (config.training.steps, config.training.eval_every, config.parallel.sequence_parallel) == (
        12,
        None,
        False,
    )


def test_an_unset_variable_is_reported_with_the_other_problems(tmp_path):
    path = trees.file(tmp_path, training={"steps": "${STEPS}", "seq_len": 0})
    with pytest.raises(ConfigError) as caught:
        load(path, env={})
    assert [problem.key for problem in caught.value.problems] == ["training.steps", "training.seq_len"]
    assert "export STEPS" in str(caught.value)


def test_a_variable_in_an_overridden_value_may_be_unset(tmp_path):
    path = trees.file(tmp_path, training={"steps": "${STEPS}"})
    assert load(path, ["training.steps=3"], env={}).training.steps == 3


def test_only_paths_are_limited_to_the_names_that_file_systems_take():
    prompt = "x" * 300 + "\0"
    assert trees.config(logging={"sample_prompt": prompt}).logging.sample_prompt == prompt
    found = trees.problems(
        run={"name": "x" * 256}, init={"from": "x" * 256}, data={"train": {f"x/{'é' * 128}": 1}}
    )
    assert found.keys() == {"run.name", "init.from", "data.train"}


def test_a_tilde_is_the_home_folder_in_every_path_and_only_there(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    loaded = trees.config(
        run={"root": "~/runs"},
        data={"train": ["~/a", "b/~c"], "index_cache": "~"},
        init={"from": "~/dense"},
        uptrain={"distill": {"teacher": "~nobody-of-this-name/x"}},
        logging={"sample_prompt": "~/runs"},
    )
    assert str(loaded.run.folder) == "/home/me/runs/small"
    assert [str(corpus.path) for corpus in loaded.data.train] == ["/home/me/a", "b/~c"]
    assert str(loaded.data.index_cache) == "/home/me"
    assert str(loaded.init.source) == "/home/me/dense"
    assert str(loaded.uptrain.distill.teacher) == "~nobody-of-this-name/x"
    assert loaded.logging.sample_prompt == "~/runs"
