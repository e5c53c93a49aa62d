from pathlib import Path

import pytest

from megakernel.config import NOT_FINITE, UNPROVEN, ConfigError, check_same_run, differences, to_yaml
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
