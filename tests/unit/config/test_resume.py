import re
from pathlib import Path

import pytest

from megakernel.config import (
    NOT_FINITE,
    UNPROVEN,
    ConfigError,
    check_same_run,
    differences,
    to_yaml,
    yaml_text,
)
from megakernel.config.resume import check_allowed, saved_steps
from megakernel.config.section import merged

from .trees import config

FOLDER = Path("runs/small")


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"steps": 200, "micro_batch_size": 2, "log_every": 1, "skip_samples": [[0, 8]]}},
        {"parallel": {"tensor": 2, "zero_stage": 1}},
        {"checkpoint": {"every": 5}, "logging": {"tensorboard": False}},
        {"training": {"profile": {"start": 3}}, "logging": {"histograms_every": 7}},
        {"run": {"name": "moved", "root": "elsewhere"}},
        {"data": {"num_workers": 0, "validation": "data/y"}},
        {"deepspeed": {"zero_optimization": {"overlap_comm": False}}},
    ],
)
def test_layout_logging_paths_and_steps_may_change(changes):
    accepted = check_same_run(to_yaml(config()), config(**changes), FOLDER)
    assert len(accepted) >= 1
    assert all(difference.may_change for difference in accepted)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"run": {"seed": 1}}, "run.seed"),
        ({"model": {"num_layers": 5}}, "model.num_layers"),
        ({"model": {"attention": "softmax"}}, "model.attention.similarity"),
        ({"data": {"train": "data/y"}}, "data.train"),
        ({"data": {"isolate_documents": False}}, "data.isolate_documents"),
        ({"training": {"global_batch_size": 16}}, "training.global_batch_size"),
        ({"training": {"seq_len": 256}}, "training.seq_len"),
        ({"training": {"dtype": "float32"}}, "training.dtype"),
        ({"optimizer": {"lr": 1.0}}, "optimizer.lr"),
        ({"schedule": {"warmup_steps": 1}}, "schedule.warmup_steps"),
    ],
)
def test_keys_that_determine_the_numbers_may_not_change(changes, key):
    with pytest.raises(ConfigError, match="when the run began") as caught:
        check_same_run(to_yaml(config()), config(**changes), FOLDER)
    assert key in {problem.key for problem in caught.value.problems}


def test_before_a_finite_step_learning_rates_or_everything_may_change():
    recorded = to_yaml(config(optimizer={"mechanism_lr": 1e-2}))
    other = {"model": {"num_layers": 5}}
    slower = {"optimizer": {"lr": 1e-5, "mechanism_lr": 1e-4}}
    assert check_same_run(UNPROVEN + recorded, config(**other, **slower), FOLDER)
    assert check_same_run(NOT_FINITE + recorded, config(**slower), FOLDER)
    with pytest.raises(ConfigError, match=r"model\.num_layers=5 was 4 when the run began") as caught:
        check_same_run(NOT_FINITE + recorded, config(**other, **slower), FOLDER)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("before", "after"), [(None, 1e-4), (1e-4, None)])
def test_after_non_finite_steps_mechanisms_get_no_learning_rate_of_their_own(before, after):
    recorded = NOT_FINITE + to_yaml(config(optimizer={"mechanism_lr": before}))
    with pytest.raises(ConfigError, match=f"^optimizer.mechanism_lr={after} was {before} when the run began"):
        check_same_run(recorded, config(optimizer={"lr": 1e-5, "mechanism_lr": after}), FOLDER)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"training": {"steps": 200}}, "training.steps"),
        ({"init": {"from": "models/other"}}, "init.from"),
        ({"init": {"moments": "runs/dense"}}, "init.moments"),
    ],
)
def test_the_inputs_of_up_training_stages_may_not_change(changes, key):
    staged = {"init": {"from": "models/dense"}, "uptrain": {}}
    with pytest.raises(ConfigError, match=f"^{key}=.* when the run began"):
        check_same_run(to_yaml(config(**staged)), config(**merged(staged, changes)), FOLDER)


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"optimizer": {"lr": 1e-5}}, ["optimizer.lr"]),
        ({"optimizer": {"weight_decay": 0.0, "clip_grad_norm": 2.0}},
         ["optimizer.weight_decay", "optimizer.clip_grad_norm"]),
        ({"schedule": {"name": "wsd", "decay_steps": 5, "warmup_steps": 3}}, ["schedule"]),
        ({"schedule": {"name": "linear"}}, ["schedule.name"]),
        ({"training": {"z_loss": 1e-4}}, ["training.z_loss"]),
        ({"model": {"dropout": {"residual": 0.1, "embedding": 0.2}}}, ["model.dropout"]),
        ({"model": {"dropout": {"residual": 0.1}}}, ["model.dropout.residual"]),
        # What may change anyway, or has changed at an earlier start, needs no permission.
        ({"training": {"steps": 200}}, ["training.steps", "optimizer.lr"]),
    ],
)  # fmt: skip
def test_keys_change_on_purpose_and_only_those_that_are_named(changes, allowed):
    recorded, wanted = to_yaml(config()), config(**changes)
    check_allowed(allowed, wanted)
    accepted = check_same_run(recorded, wanted, FOLDER, allowed)
    assert {item.key for item in accepted} == {item.key for item in differences(config(), wanted)} != set()
    other = config(**merged(changes, {"optimizer": {"eps": 1e-6}}))
    with pytest.raises(
        ConfigError, match=r"^optimizer\.eps=1e-06 was 1e-08 .* add --allow-change optimizer\.eps$"
    ):
        check_same_run(recorded, other, FOLDER, allowed)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.num_layers", "it decides which weights the model has"),
        ("model.attention", "it decides which weights the model has"),
        ("data.train", "it decides which samples the run reads, in which order; start a new run"),
        ("run.seed", "it decides the order of the samples"),
        ("training.dtype", "it decides what the run reads or computes"),
        ("optimizer.decay_embeddings", "how the optimizer groups them"),
        ("optimizer", "how the optimizer groups them"),
        ("optimizer.lrr", r"names no key; did you mean optimizer\.lr"),
        ("lr", r"names no key; did you mean optimizer\.lr"),
        ("", "names no key"),
    ],
)
def test_what_never_changes_within_a_run_cannot_be_allowed(key, said):
    with pytest.raises(ConfigError, match=rf"^--allow-change={re.escape(key) or chr(39) * 2} .*{said}"):
        check_allowed(["optimizer.lr", key], config())


@pytest.mark.parametrize(("before", "after"), [(None, 1e-4), (1e-4, None)])
def test_mechanisms_get_no_learning_rate_of_their_own_on_purpose(before, after):
    recorded, allowed = to_yaml(config(optimizer={"mechanism_lr": before})), ["optimizer.mechanism_lr"]
    with pytest.raises(ConfigError, match=f"^optimizer.mechanism_lr={after} was {before} when the run began"):
        check_same_run(recorded, config(optimizer={"mechanism_lr": after}), FOLDER, allowed)
    recorded = to_yaml(config(optimizer={"mechanism_lr": 1e-3}))
    assert check_same_run(recorded, config(optimizer={"mechanism_lr": 1e-4}), FOLDER, allowed)


def test_a_batch_changes_from_the_newest_checkpoint_on_and_the_error_says_how(tmp_path):
    allowed, recorded = ["training.global_batch_size"], to_yaml(config())
    for name in ("step_30", "step_40", "step_50.partial", "step_60.set_aside"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert saved_steps(tmp_path) == 40
    larger = {"global_batch_size": 16}
    with pytest.raises(ConfigError, match=r"was 8 in the 40 steps that the run has done; keep") as caught:
        check_same_run(recorded, config(training=larger), tmp_path, allowed)
    [remedy] = re.findall("training.seq_len_schedule='(.*)'", str(caught.value))
    larger["seq_len_schedule"] = yaml_text.parse(remedy, "remedy")
    assert larger["seq_len_schedule"] == [{"until_step": 40, "seq_len": 512, "global_batch_size": 8}]
    accepted = check_same_run(recorded, config(training=larger), tmp_path, allowed)
    assert {item.key for item in accepted} == {"training.global_batch_size", "training.seq_len_schedule"}
    with pytest.raises(ConfigError, match=r"add --allow-change training\.global_batch_size"):
        check_same_run(recorded, config(training=larger), tmp_path)
    # A second change keeps both.
    larger["global_batch_size"] = 32
    (tmp_path / "checkpoints/step_60").mkdir()
    once = to_yaml(config(training={**larger, "global_batch_size": 16}))
    with pytest.raises(ConfigError) as caught:
        check_same_run(once, config(training=larger), tmp_path, allowed)
    [remedy] = re.findall("training.seq_len_schedule='(.*)'", str(caught.value))
    larger["seq_len_schedule"] = yaml_text.parse(remedy, "remedy")
    assert [entry["global_batch_size"] for entry in larger["seq_len_schedule"]] == [8, 16]
    assert check_same_run(once, config(training=larger), tmp_path, allowed)
    early = {
        "global_batch_size": 16,
        "seq_len_schedule": [{**larger["seq_len_schedule"][0], "until_step": 39}],
    }
    with pytest.raises(ConfigError, match="in the 60 steps that the run has done"):
        check_same_run(recorded, config(training=early), tmp_path, allowed)
    assert check_same_run(recorded, config(training=early), tmp_path, allowed, done=39)


def test_the_error_keeps_the_rotary_frequencies_of_the_steps_so_far(tmp_path):
    (tmp_path / "checkpoints/step_40").mkdir(parents=True)
    yarn = {"kind": "yarn", "factor": 8, "original_seq_len": 512}
    wanted = {"model": {"rope_base": 5e5, "rope_scaling": yarn}, "training": {"seq_len": 4096}}
    allowed, recorded = ["training.seq_len", "model.rope_base", "model.rope_scaling"], to_yaml(config())
    with pytest.raises(ConfigError) as caught:
        check_same_run(recorded, config(**wanted), tmp_path, allowed)
    remedies = set(re.findall("training.seq_len_schedule='(.*)'", str(caught.value)))
    [schedule] = [yaml_text.parse(remedy, "remedy") for remedy in remedies]
    again = merged(wanted, {"training": {"seq_len_schedule": schedule}})
    assert check_same_run(recorded, config(**again), tmp_path, allowed)


def test_equivalent_configurations_have_no_differences():
    presets = (
        config(model={"attention": "flurka"}),
        config(model={"attention": {"preset": "flurka", "near": {}}}),
    )
    assert differences(*presets) == []


def test_an_error_names_both_values_and_the_remedy():
    with pytest.raises(ConfigError) as caught:
        check_same_run(to_yaml(config()), config(model={"num_layers": 5}), FOLDER)
    assert str(caught.value) == (
        "model.num_layers=5 was 4 when the run began; "
        "set it back, or choose another run.name to start a new run beside runs/small"
    )


def test_a_damaged_recorded_configuration_is_named():
    with pytest.raises(ConfigError, match=r"runs/small/config\.yaml:1 is not YAML"):
        check_same_run("run: [", config(), FOLDER)
    for text in ("", "- run", "run"):
        with pytest.raises(ConfigError, match=r"^runs/small/config\.yaml holds no sections; restore it"):
            check_same_run(text, config(), FOLDER)


def test_a_key_that_this_version_does_not_know_is_reported_with_the_recorded_file():
    recorded = to_yaml(config()) + "\nlater: {key: 1}\n"
    with pytest.raises(ConfigError, match=r"^runs/small/config\.yaml: later=\{'key': 1\} is an unknown key"):
        check_same_run(recorded, config(), FOLDER)
