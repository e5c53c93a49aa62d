"""Dropout in a model: where it is, and where it is not."""

import pytest
import torch

from megakernel.ops.dropout import stream_of, token_numbers
from tests.unit.generation.small_models import FLURKA, build

TOKENS = torch.arange(48).view(2, 24)
POSITIONS = torch.arange(24).expand(2, -1)
PLACES = ["attention", "residual", "embedding"]


def numbers(step: int = 0) -> torch.Tensor:
    return token_numbers(stream_of(0, "dropout", step), 0, 2, 0, 24)


def hidden(model, step: int | None = 0) -> torch.Tensor:
    """Final hidden states of a step; None: those of evaluation, whose inputs have no numbers."""
    labels, targets = torch.zeros_like(TOKENS), torch.ones(1, dtype=torch.int64)
    more = () if step is None else (labels, targets, numbers(step))
    return model.body((TOKENS, POSITIONS, *more))[0]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "parts", [{}, {"position": "learned", "max_positions": 24}, {"parallel_residual": True}]
)
def test_every_place_drops_in_training_alone_and_differently_in_every_step(place, parts):
    plain, model = (build(attention=FLURKA, dropout=dropout, **parts) for dropout in ({}, {place: 0.3}))
    expected = hidden(plain)
    assert torch.equal(hidden(model, None), expected)
    assert torch.equal(hidden(model), expected)  # evaluation, even with numbers
    model.train()
    plain.train()
    first = hidden(model)
    assert not torch.allclose(first, expected)
    assert torch.equal(hidden(model), first)
    assert not torch.equal(hidden(model, 1), first)
    assert torch.equal(hidden(plain), expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_layers_have_the_gradients_of_kept_ones(recompute):
    gradients = []
    for kind in ("none", recompute):
        model = build(attention=FLURKA, dropout=dict.fromkeys(PLACES, 0.2)).train()
        for layer in model.layers[1:3]:
            layer.recompute = kind == "full"
            layer.self_attention.recompute = kind == "selective"
        hidden(model).square().sum().backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_the_mean_over_steps_is_the_output_without_dropout():
    """Of a linear part: the embedding."""
    plain, model = (build(num_layers=1, dropout=dropout).train() for dropout in ({}, {"embedding": 0.5}))
    embedded = [model.layers[0]((TOKENS, POSITIONS, None, None, numbers(step)))[0] for step in range(400)]
    expected = plain.layers[0]((TOKENS, POSITIONS))[0]
    error = torch.stack(embedded).mean(0) - expected
    assert error.norm() < 2 * expected.norm() / 400**0.5
