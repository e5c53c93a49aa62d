"""The model that is measured before the stages."""

import pytest

from megakernel.uptraining.stages import stages
from megakernel.uptraining.summary import wanted_model
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
