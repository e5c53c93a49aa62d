import pytest
from pydantic import ValidationError

from megakernel.config import FeatureMap, Model
from megakernel.config.feature_map import FeatureMapName

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
