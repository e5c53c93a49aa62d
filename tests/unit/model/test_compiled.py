"""Layers under torch.compile: one graph without breaks, and as many graphs as there are shapes.

The graphs run as torch traced them; `tests/distributed/test_compile.py` trains with compiled ones.
"""

from typing import get_args

import pytest
import torch
import torch._dynamo

from megakernel.attention.map_parameters import op_map
from megakernel.config.feature_map import FeatureMap
from megakernel.model import compiled
from megakernel.ops.feature_maps import FEATURE_MAPS
from tests.unit.generation.small_models import BLOCKS, FLURKA, build

pytestmark = pytest.mark.second

MECHANISMS = {
    "softmax": "softmax",
    "softmax window": {"preset": "softmax", "window": 12},
    "local": {"preset": "local", "near": {"block_size": 8}},
    "flurka": FLURKA,
    "flurka_decay, convolution": {
        "preset": "flurka",
        **BLOCKS,
        "short_convolution": 4,
        "output_gate": "silu",
    },
    "linear": "linear",
    "hedgehog": "hedgehog",
    "chosen blocks": {"preset": "selected", "near": {"block_size": 8}, "selection": {"blocks": 2}},
    "retnet": "retnet",
    "mamba2": "mamba2",
    "gated_deltanet": "gated_deltanet",
}
OUTSIDE = {
    "performer": "performer",
    "flurka favor": {**FLURKA, "feature_map": {"name": "favor"}},
    "mgk": "mgk",
    "eva": "eva",
}
"""Mechanisms that run outside of their layers' graphs."""


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """The graphs of a test: as they were traced, counted anew."""

    def keep(graphs, graph, inputs):
        graphs.count += 1
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compiled.cache_clear()
    monkeypatch.setattr(compiled.Graphs, "compile", keep)
    graphs = compiled.Graphs()
    monkeypatch.setattr(compiled, "GRAPHS", graphs)
    yield graphs
    compiled.compiled.cache_clear()
    torch._dynamo.reset()


def losses(attention, length: int = 40, packed: bool = True) -> list[torch.Tensor]:
    """Hidden states and gradients of a model, compiled and not."""
    found = []
    tokens = torch.arange(2 * length).view(2, -1) % 60
    places = torch.arange(length)
    positions = torch.stack([places, torch.where(places < 13, places, places - 13) if packed else places])
    for is_compiled in (False, True):
        model = build(attention=attention, compiles=is_compiled).train()
        hidden = model.hidden(tokens, positions)
        hidden.square().sum().backward()
        found.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
    return found


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_layer_is_one_graph_for_packed_documents(name, traced):
    expected, found = losses(MECHANISMS[name])
    assert traced.count == 1, "both layers run one graph"
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", OUTSIDE)
def test_layers_of_other_mechanisms_have_a_graph_before_and_one_behind(name, traced):
    expected, found = losses(OUTSIDE[name])
    assert traced.count == 2 * 2, "each of two layers has its own"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", get_args(FeatureMap.model_fields["name"].annotation))
def test_the_configuration_knows_the_maps_that_ops_look_at(name):
    config = FeatureMap(name=name)
    form = FEATURE_MAPS[op_map(config).name]
    assert (config.is_unbounded, config.is_exponential) == (form.unbounded, form.exponential)


def test_a_length_is_one_more_graph(traced):
    for length in (40, 24, 40):
        losses("softmax", length)
    assert traced.count == 2


def test_a_layer_with_hooks_runs_uncompiled(traced):
    model = build(attention="softmax", compiles=True).train()
    for layer in model.layers[1:3]:
        layer.mlp.register_forward_hook(lambda *_: None)
    model.hidden(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None])
    assert traced.count == 0
