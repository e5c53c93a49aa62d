"""Layers under torch.compile: one graph without breaks, and as many graphs as there are shapes.

The graphs run as torch traced them; `tests/distributed/test_compile.py` trains with compiled ones.
"""

import gzip
import json
from contextlib import nullcontext
from functools import partial
from typing import get_args

import pytest
import torch
import torch._dynamo

from megakernel.attention.map_parameters import op_map
from megakernel.config import Profile
from megakernel.config.feature_map import FeatureMap
from megakernel.model import compiled
from megakernel.ops.feature_maps import FEATURE_MAPS
from megakernel.ops.short_convolution import CACHED_ELEMENTS
from megakernel.training.observing.profiler import Profiler
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
    "retnet": "retnet",
    "mamba2": "mamba2",
    "gated_deltanet": "gated_deltanet",
}
OUTSIDE = {
    "performer": "performer",
    "flurka favor": {**FLURKA, "feature_map": {"name": "favor"}},
    "mgk": "mgk",
    "eva": "eva",
    "chosen blocks": {"preset": "selected", "near": {"block_size": 8}, "selection": {"blocks": 2}},
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


def losses(
    attention, length: int = 40, packed: bool = True, recompute: str = "none", dtype=torch.float32
) -> list[torch.Tensor]:
    """Gradients of a model, not compiled and compiled."""
    found = []
    tokens = torch.arange(2 * length).view(2, -1) % 60
    places = torch.arange(length)
    positions = torch.stack([places, torch.where(places < 13, places, places - 13) if packed else places])
    for is_compiled in (False, True):
        model = build(attention=attention, compiles=is_compiled, recompute=recompute).train().to(dtype)
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


@pytest.mark.parametrize("name", ["softmax", "flurka", "linear"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_recomputed_layer_is_one_graph_with_the_same_gradients(name, recompute, traced):
    expected, found = losses(MECHANISMS[name], recompute=recompute)
    # Selective recomputation is traced as a part of the graph; under full recomputation, backward runs the graph again.
    assert traced.count == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_long_sequences_with_a_short_convolution_are_one_graph(traced):
    """Uncompiled, sequences of this length take another way through the convolution than short ones."""
    length = CACHED_ELEMENTS // (2 * 2 * 4 * 8)
    expected, found = losses({"preset": "softmax", "short_convolution": 4}, length)
    assert traced.count == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["flurka", "local", "linear", "hedgehog", "retnet"])
def test_sequences_of_several_groups_are_one_graph(name, traced):
    """On a CPU, uncompiled ones scan groups of tokens and recompute them in backward."""
    expected, found = losses(MECHANISMS[name], 1300)
    assert traced.count == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_blocks_are_chosen_in_long_sequences_too(traced):
    """A compiled layer once failed where blocks are read one by one, and passed where a mask was enough."""
    expected, found = losses(OUTSIDE["chosen blocks"], 1300)
    assert traced.count == 2 * 2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["softmax", "flurka", "hedgehog"])
def test_graphs_in_bfloat16_have_gradients_in_bfloat16(name, traced):
    expected, found = losses(MECHANISMS[name], dtype=torch.bfloat16)
    assert traced.count == 1
    # A rounding of bfloat16: without a compiler, backward of a norm adds the residual's gradient before it rounds.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2**-8 * expected.abs().max().item())


def test_training_and_evaluation_of_a_length_are_two_graphs(traced):
    model = build(attention=FLURKA, compiles=True)
    for phase, length in enumerate((24, 40, 24, 64), 1):
        tokens, positions = torch.zeros(2, length, dtype=torch.int64), torch.arange(length).expand(2, -1)
        for _ in range(2):
            model.train().hidden(tokens, positions).sum().backward()
        with torch.no_grad():
            model.eval().hidden(tokens, positions)
        lengths = min(phase, 2) if phase < 4 else 3
        assert traced.count <= 2 * lengths


def test_layers_run_compiled_while_a_profile_records(traced, tmp_path):
    model = build(attention="softmax", compiles=True).train()
    run = partial(model.hidden, torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None])
    run()
    wanted, notes = Profile(start=1, steps=1), []
    device = torch.device("cpu")
    with (
        Profiler(wanted, model, tmp_path, 0, device, notes.append, nullcontext) as profiler,
        profiler.step(1),
    ):
        run()
    assert traced.count == 1, "the recorded step runs the graph of the first"
    with gzip.open(tmp_path / "profile/step_1/rank_0.json.gz", "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"1 (TransformerLayer)", "2 (TransformerLayer)", "3 (FinalNorm)"} <= names
    assert not any("MLP" in name for name in names)


def test_a_part_with_hooks_makes_its_layer_run_uncompiled(traced):
    model = build(attention="softmax", compiles=True).train()
    for layer in model.layers[1:3]:
        layer.mlp.register_forward_hook(lambda *_: None)
    model.hidden(torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)[None])
    assert traced.count == 0
