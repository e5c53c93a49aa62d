"""Plots of a model in training, which do not change the training."""

import pytest
import torch

from megakernel.analysis.plots.live import attention_figures
from megakernel.model import cast

from .small_models import labelled, small_model

BLOCKS = {"compression": {"block_size": 4, "rank": 2}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_training_is_pictured_and_left_alone(dtype):
    pattern = [{"preset": "flurka", **BLOCKS, "feature_map": {"name": "gmm_prf"}}, "softmax"]
    model = cast(small_model("softmax", attention_pattern=pattern), dtype).train()
    before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    figures = attention_figures(model, labelled(3), length=16, heads=2)
    assert torch.rand(1) == expected
    assert list(figures) == [
        "analysis/attention/layer_0",
        "analysis/attention/layer_1",
        "analysis/singular_values/weights",
        "analysis/singular_values/output",
        "analysis/covariances/eigenvalues",
    ]
    panels = [axes for axes in figures["analysis/attention/layer_1"].axes if axes.get_images()]
    assert [axes.get_title() for axes in panels] == ["head 0", "head 1"]
    assert panels[0].get_images()[0].get_array().shape == (16, 16)
    assert model.training
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_ranks_that_draw_nothing_do_the_same_work():
    model = small_model("softmax")
    runs = []
    model.layers[1].self_attention.core.register_forward_hook(lambda *_: runs.append(1))
    assert attention_figures(model, labelled(1), length=16, draw=False) == {}
    undrawn, runs[:] = len(runs), []
    attention_figures(model, labelled(1), length=16)
    assert len(runs) == undrawn == 1 + 16 // 8
