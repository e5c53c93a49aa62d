"""Singular values and ranks of matrices, spans of windows and gates, in cases with known values."""

import math

import pytest
import torch

from megakernel.analysis.plots import choices, reach, spectra
from megakernel.analysis.plots.matrices import CELLS, attention_matrix, exact_matrix, image_rows
from megakernel.analysis.plots.subject import captured_attention, first_sequence
from megakernel.uptraining.sampled_queries import CapturedInputs, SampledQueries

from .small_models import LENGTH, layer_inputs, small_model


def orthogonal(size, seed):
    draw = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(draw)[0]


def with_singular_values(values):
    return (orthogonal(len(values), 0) * torch.tensor(values, dtype=torch.float64)) @ orthogonal(
        len(values), 1
    )


def test_singular_values_and_ranks_are_those_of_the_constructed_matrix():
    matrices = torch.stack(
        [with_singular_values([8.0, 4.0, 2.0, 5e-7]), with_singular_values([1.0, 1.0, 1.0, 1.0])]
    )
    found = spectra.relative_singular_values(matrices)
    torch.testing.assert_close(found[0, :3], torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
    rank, stable = spectra.ranks(matrices)
    assert rank.tolist() == [3, 4]
    assert stable.tolist() == pytest.approx([(64 + 16 + 4) / 64, 4.0])


def test_kernel_attention_has_a_low_rank_matrix_and_softmax_a_full_rank_one():
    """FLuRKA, figure 1: the rank of a head is at most its number of features. Float32 is too imprecise to show it."""
    row = first_sequence((layer_inputs()[0], torch.arange(LENGTH)[None]), LENGTH)
    for config, expected_rank in (({"preset": "linear"}, 8), ("softmax", LENGTH)):
        model = small_model(config, kind="masked_lm")
        captured = captured_attention(model, row)[0]
        rank, _ = spectra.ranks(exact_matrix(captured))
        assert rank.tolist() == [expected_rank] * 4


def spans(weights, window=None, causal=True, positions=None):
    """The columns of `span_sums` for one head, as means by name."""
    tokens = weights.shape[-1]
    q = torch.zeros(1, 1, tokens, 2)
    inputs = CapturedInputs(positions, q=q, k=q, v=q)
    rows = SampledQueries.of(inputs, torch.arange(tokens), causal)
    sums, counts = reach.span_sums(weights[None], rows, window)
    return {
        name: (value / count).item() if count else None
        for name, value, count in zip(reach.COLUMNS, sums[0], counts[0])
    }


def test_the_span_of_a_window_is_half_its_length():
    """Each token attends uniformly to its block of 4, so 0, 1/2, 1, 3/2 tokens back on average."""
    weights = torch.block_diag(*[torch.ones(4, 4)] * 3).tril()
    found = spans(weights / weights.sum(-1, keepdim=True), window=(4, 1))
    assert found["span"] == pytest.approx(0.75)
    assert found["far_mass"] == 0
    assert found["beyond_16"] is None


def test_far_weight_of_uniform_attention_is_the_fraction_of_far_tokens():
    tokens = 40
    weights = torch.ones(tokens, tokens).tril()
    found = spans(weights / weights.sum(-1, keepdim=True), window=(8, 2))
    assert found["span"] == pytest.approx(sum(i / 2 for i in range(tokens)) / tokens)
    far = [(i // 8 - 1) * 8 / (i + 1) for i in range(16, tokens)]
    assert found["far_mass"] == pytest.approx(sum(far) / len(far))
    beyond = [(i - 15) / (i + 1) for i in range(16, tokens)]
    assert found["beyond_16"] == pytest.approx(sum(beyond) / len(beyond))


def test_the_span_ignores_other_documents():
    weights = torch.eye(8)
    weights[4:, 0] = 100.0  # on another document: does not count
    found = spans(weights, positions=torch.arange(4).repeat(2)[None])
    assert found["span"] == 0


@pytest.mark.parametrize("preset", ["selected", "flurka_selected"])
def test_chosen_blocks_hold_all_that_softmax_has_far_away_if_all_are_chosen(preset):
    config = {"preset": preset, "selection": {"blocks": LENGTH}}
    if preset == "selected":
        config |= {"near": {"block_size": 4}}
    else:
        config |= {"compression": {"block_size": 4, "rank": 2}}
    captured = captured_attention(small_model(config), first_sequence(layer_inputs(), LENGTH))[0]
    values, counts = choices.choice_sums(captured)
    assert counts.shape == (4, len(choices.COLUMNS))
    means = dict(zip(choices.COLUMNS, (values / counts).mean(0).tolist()))
    assert means["found"] == pytest.approx(1.0)
    assert 0 < means["far"] < 1


def test_a_choice_of_one_block_finds_less_and_is_measured_where_it_is():
    """Documents of 9 and 15 tokens in blocks of 4: 5 and 11 queries see 1, and 1 to 3 blocks, and choose one."""
    config = {"preset": "selected", "near": {"block_size": 4}, "selection": {"blocks": 1, "unit": "tile"}}
    captured = captured_attention(small_model(config), first_sequence(layer_inputs(), LENGTH))[0]
    values, counts = choices.choice_sums(captured)
    found = dict(zip(choices.COLUMNS, zip(values.T.tolist(), counts.T.tolist())))
    assert found["far"][1] == [5 + 11] * 4
    assert found["distance"][1] == [4.0 * (5 + 11)] * 4
    # Of tile choices, only the first token of a tile can choose otherwise than the token before.
    assert all(value >= 4 * (16 - 2 - 3) for value in found["repeated"][0])
    assert all(value < whole for value, whole in zip(*found["found"]))


def gated(bias):
    config = {
        "preset": "flurka",
        "compression": {"block_size": 4, "rank": 2},
        "near": {"gate_bias": bias},
    }
    model = small_model(config)
    core = model.layers[1].self_attention.core
    with torch.no_grad():
        core.gate_weight.zero_()
        core.gate_bias.fill_(bias)
    return captured_attention(model, first_sequence(layer_inputs(), LENGTH))[0]


def test_a_gate_without_weights_has_the_value_of_its_bias():
    """Only queries after the first block of their document have a far context: 5 of 9 tokens, and 11 of 15."""
    gates = reach.near_shares(gated(3.0))
    assert gates.shape == (4, 5 + 11)
    expected = 1 / (1 + math.exp(-3))
    assert gates.flatten().tolist() == pytest.approx([expected] * gates.numel())
    rows = reach.histogram(0, gates)
    assert [row["near"] for row in rows if row["head"] == 2 and row["share"]] == [0.95]
    assert all(row["gate"] == pytest.approx(expected) for row in rows)


def test_far_weight_of_a_gated_layer_is_one_minus_its_gate():
    """Both parts are normalized on their own, so far tokens have 1 - g of the weight."""
    captured = gated(-1.0)
    rows = SampledQueries.of(captured.inputs, torch.arange(LENGTH), causal=True)
    sums, counts = reach.span_sums(attention_matrix(captured), rows, captured.core.near_window)
    far = dict(zip(reach.COLUMNS, (sums / counts).T))["far_mass"]
    assert far.tolist() == pytest.approx([1 - 1 / (1 + math.e)] * 4, rel=1e-5)


def test_an_image_preserves_the_weight_of_every_query():
    tokens = 2 * CELLS + 5
    weights = torch.rand(2, tokens, tokens, generator=torch.Generator().manual_seed(0)).tril()
    weights = weights / weights.sum(-1, keepdim=True)
    rows = image_rows(3, weights)
    for head in range(2):
        of_queries = {}
        for row in (row for row in rows if row["head"] == head):
            of_queries[row["query"]] = of_queries.get(row["query"], 0.0) + row["weight"]
        assert list(of_queries) == list(range(0, tokens, 3))
        assert list(of_queries.values()) == pytest.approx([1.0] * len(of_queries), rel=1e-5)
    assert all(row["key"] <= row["query"] for row in rows)
    first = next(row for row in rows if (row["head"], row["query"], row["key"]) == (0, 3, 0))
    assert first["weight"] == pytest.approx(weights[0, 3:6, :3].sum(-1).mean().item(), rel=1e-5)
