"""Counted costs of a layer's attention, against formulas written down here."""

import pytest

from benchmarks.layer_costs import KINDS, counted, one_layer
from megakernel.parallel import prepare_device

WIDTH, HEADS, TOKENS, VOCAB = 128, 2, 512, 1000
ONE_MATRIX = 2 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def costs():
    prepare_device("cpu", 0)
    return {name: counted(one_layer(tree, WIDTH, HEADS, TOKENS), VOCAB) for name, tree in KINDS.items()}


def test_landmarks_alone_project_an_eighth_of_the_keys_and_values(costs):
    found = {name: cost.projections / ONE_MATRIX for name, cost in costs.items()}
    assert found.pop("landmarks alone") == 2 + 2 / 8
    assert set(found.values()) == {4}


def test_flurka_costs_its_window_and_its_landmarks(costs):
    """Both have filters for queries, FLuRKA once; and it has a gate between the two parts."""
    window, landmarks, both = (
        costs[name].core for name in ("window of a block (`local`)", "landmarks alone", "FLuRKA")
    )
    pooling = 2 * 8 * 2 * WIDTH  # E and F, once
    filters, gate = 2 * 4 * WIDTH, 2 * WIDTH
    assert both == pytest.approx(window + landmarks - filters + gate, rel=1e-12)
    assert landmarks > pooling + filters


def test_bytes_include_every_token_of_the_layers_input_and_output(costs):
    """Bfloat16, read and written in each direction; FLuRKA's kernels move less than operations of torch."""
    assert all(cost.bytes > 4 * 2 * WIDTH for cost in costs.values())
    assert costs["FLuRKA"].kernels > costs["landmarks alone"].kernels
    assert costs["FLuRKA"].operations < costs["landmarks alone"].operations
