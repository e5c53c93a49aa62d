import pytest
from pydantic import ValidationError

from benchmarks.experiments.runs import make_run
from benchmarks.experiments.study import read_study
from megakernel.checkpoint.trained_run import recorded_config
from megakernel.config import (
    Attention,
    FeatureMap,
    Model,
    UserError,
    check_recorded_run,
    expand_preset,
    to_yaml,
)
from megakernel.config.feature_map import FeatureMapName
from tests.unit.config.trees import config

SIZES = {"num_layers": 2, "hidden_size": 96, "num_heads": 4}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"name": "elu", "samples": 8}, "samples"),
        ({"name": "rff", "components": 3}, "components"),
        ({"name": "gmm_prf", "tied": False}, "tied"),
        ({"name": "gmm_rks", "learn": "S"}, "learn"),
        ({"name": "fastfood_prf", "resample_every": 10}, "resample_every"),
        ({"name": "gmm_rks", "components": 3}, "components"),
    ],
)
def test_options_that_a_feature_map_does_not_have_are_refused(options, key):
    with pytest.raises(ValidationError, match=f"{key}={options[key]}"):
        FeatureMap.model_validate(options)


def test_an_untied_mixture_can_have_three_components():
    assert FeatureMap(name="gmm_rks", components=3, tied=False).frequencies(16) == 48


def test_a_feature_map_with_all_keys_written_out_is_valid():
    for name in FeatureMapName.__args__:
        written = FeatureMap(name=name).model_dump()
        assert FeatureMap.model_validate(written) == FeatureMap(name=name)


def test_fastfood_samples_must_be_a_multiple_of_the_head_dimension_in_all_layers():
    attention = {"preset": "fastfood_prf", "feature_map": {"samples": 32}}
    for tree in (
        {"attention": attention},
        {"attention": "softmax", "attention_pattern": ["main", attention]},
    ):
        with pytest.raises(
            ValidationError, match=r"samples=32 is not a multiple of head_dim=24; set 24 or 48"
        ):
            Model.model_validate({**SIZES, **tree})


def test_only_learned_feature_maps_are_redrawn_every_100_steps_by_default():
    intervals = {name: FeatureMap(name=name).redraw_interval for name in FeatureMapName.__args__}
    learned = {"gmm_rks", "gmm_prf", "generative_rks", "generative_prf"}
    assert {name for name, interval in intervals.items() if interval} == learned
    assert {intervals[name] for name in learned} == {100}
    assert FeatureMap(name="favor", resample_every=7).redraw_interval == 7


@pytest.mark.parametrize("name", ["rff", "gmm_rks", "fastfood_rks", "generative_rks"])
def test_maps_of_cosines_have_a_constant_feature_unless_it_is_set(name, tmp_path):
    """Learning the Transformer Kernel's setting, in presets, changed presets, and configurations of its benchmarks."""
    trees = (
        name,
        {"preset": name, "feature_map": {"samples": 64}},
        {"preset": "flurka", "feature_map": {"name": name}},
    )
    for tree in trees:
        assert Attention.model_validate(expand_preset(tree)).feature_map.smoothing == 1.0
    assert (
        Attention.model_validate(
            expand_preset({"preset": name, "feature_map": {"smoothing": 0}})
        ).feature_map.smoothing
        == 0
    )
    changed = {"preset": name, "feature_map": {"name": "elu"}}
    assert Attention.model_validate(expand_preset(changed)).feature_map.smoothing == 0.0
    tasks = [("lra_kl", task) for task in read_study("lra_kl").study.variants]
    for study, variant in [*tasks, ("glue_kl", "rte"), ("sparsity", "0.5")]:
        run = make_run(read_study(study), name, variant, 0)
        assert run.config.model.attention.feature_map.smoothing == 1.0


def test_a_recorded_run_keeps_the_smoothing_that_it_had(tmp_path):
    """Older runs of these presets recorded 0, which the same command must not change without a word."""
    old = config(
        run={"name": "old", "root": str(tmp_path)},
        model={"attention": {"preset": "gmm_rks", "feature_map": {"smoothing": 0}}},
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text(to_yaml(old))
    assert recorded_config(tmp_path / "old").model.attention.feature_map.smoothing == 0.0
    again = config(run={"name": "old", "root": str(tmp_path)}, model={"attention": "gmm_rks"})
    with pytest.raises(UserError, match=r"model.attention.feature_map.smoothing.*0\.0"):
        check_recorded_run(again)
