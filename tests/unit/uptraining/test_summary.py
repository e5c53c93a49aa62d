"""The model that is measured before the stages, and the errors of a transfer."""

import json

import pytest

from megakernel.uptraining.stages import stages
from megakernel.uptraining.summary import head_scalars, wanted_model, worst_layers
from tests.unit.config import trees


@pytest.mark.parametrize(("keep", "kept", "softmax"), [([1], None, [1]), (1, None, []), (1, [2], [2])])
def test_the_swapped_model_keeps_the_softmax_layers_that_are_known(keep, kept, softmax):
    config = trees.config(
        model={"attention": "hedgehog", "num_layers": 3},
        init={"from": "models/dense"},
        uptrain={"layers": {"keep": keep}, "transfer": {"steps": 1}},
    )
    model = wanted_model(config, stages(config, kept))
    assert [layer for layer in range(3) if model.layer_attention(layer).is_plain_softmax] == softmax


def test_a_layer_whose_error_is_not_finite_is_the_worst(tmp_path):
    tags = {f"transfer/error/layer_{layer}/head_0": error for layer, error in enumerate([0.5, None, 0.9])}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, **tags}) + "\n")
    assert worst_layers(head_scalars(tmp_path), 1) == [1]
    assert worst_layers(head_scalars(tmp_path), 2) == [1, 2]
