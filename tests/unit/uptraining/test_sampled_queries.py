"""Attention weights of sampled queries equal those of the layer, and so do their gradients."""

import pytest
import torch

from megakernel import attention
from megakernel.uptraining import sampled_queries
from megakernel.uptraining.sampled_queries import CapturedInputs, SampledQueries, sample_queries
from megakernel.uptraining.transfer import FLOOR, cross_entropy

BATCH, TOKENS, DIM, BLOCK = 2, 13, 4, 4
QUERIES = torch.tensor([0, 3, 5, 8, 9, 12])
PACKED = torch.stack([torch.arange(TOKENS), torch.cat([torch.arange(6), torch.arange(7)])])
PADDED = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])

BLOCKS = {"compression": {"block_size": BLOCK, "rank": 2}}
LAYERS = {
    "flurka": {"preset": "flurka", **BLOCKS},
    "shared": {"preset": "flurka", **BLOCKS, "near": {"blocks": 2, "join": "shared"}, "far_rope": "centroid"},
    "flurka_kernel": {"preset": "flurka_kernel", **BLOCKS},
    "linformer_causal": {"preset": "linformer_causal", **BLOCKS},
    "hedgehog": "hedgehog",
    "softmax": "softmax",
    "sliding": {"preset": "softmax", "window": 5},
}
SOFTMAX = {"softmax": None, "sliding": 5}
"""Dense layers -> their window."""


def example(name, heads=4, kv_heads=2, causal=True, positions=PACKED, padding=None):
    """A layer with random parameters, and inputs for it."""
    draw = torch.Generator().manual_seed(1)
    core = attention.build(
        name, num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, causal=causal, seed=1
    ).double()
    with torch.no_grad():
        for parameter in core.parameters():
            parameter += torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    q, k, v = (
        torch.randn(BATCH, count, TOKENS, DIM, generator=draw, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads)
    )
    return core, CapturedInputs(positions, padding, attention.Rotary(DIM), q=q, k=k, v=v)


def whole_matrix(core, inputs):
    """Attention matrix (B, H, N, N): the outputs for values that are the rows of the identity."""
    one_hot = torch.eye(TOKENS, dtype=torch.float64).expand(*inputs.k.shape[:2], -1, -1)
    return inputs.run(core, one_hot)


def test_scores_are_the_same_from_keys_in_parts(monkeypatch):
    _, inputs = example("softmax", heads=6, kv_heads=2)
    q, k = inputs.rotated_by_place(inputs.q, inputs.k)
    expected = q[:, :, QUERIES] @ k.repeat_interleave(3, 1).mT / DIM**0.5
    for count in (5, TOKENS):
        monkeypatch.setattr(sampled_queries, "KEYS_AT_ONCE", count)
        rows = SampledQueries.of(inputs, QUERIES, causal=True)
        torch.testing.assert_close(rows.scores(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "heads", [(4, 2), (6, 1)], ids=["shared keys", "more queries to a key than numbers in it"]
)
def test_weights_are_rows_of_the_attention_matrix(name, heads):
    core, inputs = example(LAYERS[name], *heads)
    rows = SampledQueries.of(inputs, QUERIES, causal=True)
    weights = rows.weights(core)
    torch.testing.assert_close(weights, whole_matrix(core, inputs)[:, :, QUERIES], rtol=1e-12, atol=1e-14)
    assert not weights.masked_fill(rows.visible[:, None], 0.0).any()
    if name in SOFTMAX:
        softmax = rows.softmax(rows.scores(), SOFTMAX[name])
        torch.testing.assert_close(softmax, weights, rtol=1e-12, atol=1e-14)


def test_padding_neither_attends_nor_is_attended():
    for name in ("softmax", "hedgehog"):
        core, inputs = example(name, causal=False, positions=None, padding=PADDED)
        rows = SampledQueries.of(inputs, QUERIES, causal=False)
        weights = rows.weights(core)
        torch.testing.assert_close(weights, whole_matrix(core, inputs)[:, :, QUERIES], rtol=1e-12, atol=1e-14)
        assert not weights[1, :, :, 9:].any()
        assert rows.real.sum(1).tolist() == [6, 4]
        if name == "softmax":
            torch.testing.assert_close(rows.softmax(rows.scores()), weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in SOFTMAX])
def test_gradients_of_the_cross_entropy_equal_those_of_the_full_matrix(name):
    core, inputs = example(LAYERS[name])
    parameters = list(core.parameters())
    rows = SampledQueries.of(inputs, QUERIES, causal=True)
    teacher_weights = rows.softmax(rows.scores())
    values, gradients = cross_entropy(teacher_weights, rows.weights(core), rows.real)
    found = torch.autograd.grad(rows.weighted_sum(core, gradients), parameters, allow_unused=True)

    weights = whole_matrix(core, inputs)[:, :, QUERIES]
    hidden = ~rows.visible[:, None]
    expected = -(teacher_weights * weights.masked_fill(hidden, 1.0).clamp(min=FLOOR).log()).sum(-1).mean(-1)
    torch.testing.assert_close(values, expected)
    for actual, wanted in zip(found, torch.autograd.grad(expected.sum(), parameters, allow_unused=True)):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12)


def test_a_vanishing_weight_has_a_finite_gradient():
    """Below FLOOR the loss is linear, with the gradient at FLOOR."""
    teacher = torch.ones(1, 1, 1, 4, dtype=torch.float64) / 4
    student = (
        torch.tensor([-FLOOR, 0.0, FLOOR / 2, 0.5], dtype=torch.float64).view(1, 1, 1, 4).requires_grad_()
    )
    value, gradients = cross_entropy(teacher, student, torch.ones(1, 1, dtype=torch.bool))
    torch.testing.assert_close(gradients, torch.autograd.grad(value.sum(), student)[0])
    assert gradients.max() < 0
    assert gradients.isfinite().all()


def test_sampled_queries_depend_only_on_seed_and_step():
    sample = sample_queries(1000, 16, 3, 5)
    assert torch.equal(sample, sample_queries(1000, 16, 3, 5))
    assert len(sample.unique()) == 16
    assert not torch.equal(sample, sample_queries(1000, 16, 3, 6))
    assert sample_queries(5, 16, 3, 5).tolist() == [0, 1, 2, 3, 4]
