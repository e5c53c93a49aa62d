"""Plots during training do not change the training."""

from typing import Any

import pytest
import torch

from megakernel.analysis.plots.live import attention_figures
from megakernel.model import cast

from .small_models import labelled, small_model

BLOCKS = {"compression": {"block_size": 4, "rank": 2}}
TAGS_OF_TWO_LAYERS = [
    "plots/attention/layer_0",
    "plots/attention/layer_1",
    "plots/singular_values/weights",
    "plots/singular_values/output",
    "plots/covariances/eigenvalues",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plotting_during_training_does_not_change_the_model(dtype):
    pattern = [{"preset": "flurka", **BLOCKS, "feature_map": {"name": "gmm_prf"}}, "softmax"]
    model = cast(small_model("softmax", attention_pattern=pattern), dtype).train()
    before = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    figures = attention_figures(model, labelled(3), length=16, heads=2)
    assert torch.rand(1) == expected
    assert list(figures) == TAGS_OF_TWO_LAYERS
    panels = [axes for axes in figures["plots/attention/layer_1"].axes if axes.get_images()]
    assert [axes.get_title() for axes in panels] == ["head 0", "head 1"]
    assert panels[0].get_images()[0].get_array().shape == (16, 16)
    assert model.training
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_layers_are_plotted_in_evaluation_mode():
    """In training a window may be closed for a step, and mixture keys would count these tokens for their M-step."""
    model, modes = small_model("softmax").train(), []
    model.layers[1].self_attention.core.register_forward_hook(lambda core, *_: modes.append(core.training))
    attention_figures(model, labelled(1), length=16)
    assert modes == [False] * len(modes) != []
    assert all(module.training for module in model.modules())


def test_ranks_that_draw_no_plots_run_the_same_forwards():
    model = small_model("softmax")
    runs = []
    model.layers[1].self_attention.core.register_forward_hook(lambda *_: runs.append(1))
    assert attention_figures(model, labelled(1), length=16, draw=False) == {}
    runs_without_drawing, runs[:] = len(runs), []
    attention_figures(model, labelled(1), length=16)
    assert len(runs) == runs_without_drawing == 1 + 16 // 8


@torch.no_grad()
def test_layers_whose_numbers_are_not_finite_have_no_plots():
    learned = {"preset": "gmm_rks"}
    model = small_model("softmax", num_layers=3, attention_pattern=["softmax", learned, learned])
    model.layers[3].self_attention.qkv.weight[0] = torch.inf
    factors = [parameter for name, parameter in model.named_parameters() if name.endswith("factor")]
    factors[1][0] = torch.nan
    figures = attention_figures(model, labelled(1), length=16)
    assert list(figures) == TAGS_OF_TWO_LAYERS


@pytest.mark.parametrize("preset", ["selected", "flurka_selected"])
def test_chosen_blocks_have_plots_of_what_they_hold(preset):
    chooses: dict[str, Any] = {"preset": preset, "near": {"blocks": 1}, "selection": {"blocks": 2}}
    if preset == "selected":
        chooses["near"] |= {"block_size": 4}
    else:
        chooses["compression"] = {"block_size": 4, "rank": 2}
    model = small_model("softmax", attention_pattern=["softmax", chooses])
    figures = attention_figures(model, labelled(1), length=16)
    tags = [f"plots/choices/{name}" for name in ("found", "distance", "repeated")]
    assert [tag for tag in figures if tag.startswith("plots/choices")] == tags
    (image,) = figures[tags[0]].axes[0].get_images()
    found = image.get_array()
    assert found.shape[0] == 1, "one layer chooses"
    assert ((found > 0) & (found <= 1)).all()
    assert attention_figures(model, labelled(1), length=16, draw=False) == {}


def test_a_sequence_of_one_block_has_no_plots_of_choices():
    chooses = {"preset": "selected", "near": {"block_size": 64, "blocks": 1}}
    model = small_model("softmax", attention_pattern=["softmax", chooses])
    assert not [tag for tag in attention_figures(model, labelled(1), length=16) if "choices" in tag]
