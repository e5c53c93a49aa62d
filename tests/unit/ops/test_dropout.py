"""Dropout: masks that are functions of the tokens' numbers."""

import pytest
import torch
from torch import Tensor

from megakernel.ops.dropout import dropout, stream_of, token_numbers


def numbers(sequences: int = 8, tokens: int = 64, *, step: int = 0, seed: int = 0) -> Tensor:
    return token_numbers(stream_of(seed, "dropout", step), 0, sequences, 0, tokens)


def mask(channels: int, probability: float = 0.5, stream: int = 1, **of: int) -> Tensor:
    """1 where a channel is kept."""
    tokens = numbers(**of)
    ones = torch.ones(*tokens.shape, channels, dtype=torch.float64)
    return (dropout(ones, tokens, probability, stream) != 0).double()


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_a_share_of_p_is_dropped_and_the_others_are_divided_by_the_rest(probability):
    kept = mask(512, probability)
    expected = (kept.numel() * probability * (1 - probability)) ** 0.5
    assert abs((1 - kept).sum() - kept.numel() * probability) < 5 * expected
    x = torch.randn(8, 64, 512, dtype=torch.float64)
    scaled = x / (1 - probability)
    torch.testing.assert_close(dropout(x, numbers(), probability, 1), scaled * kept, rtol=1e-4, atol=0)


def test_masks_of_tokens_channels_steps_seeds_and_places_are_independent():
    kept = mask(512) - 0.5
    others = {
        "tokens": kept.roll(1, 1),
        "sequences": kept.roll(1, 0),
        "channels": kept.roll(1, 2),
        "groups of channels": kept.roll(4, 2),
        "steps": mask(512, step=1) - 0.5,
        "seeds": mask(512, seed=1) - 0.5,
        "places": mask(512, stream=2) - 0.5,
    }
    for name, other in others.items():
        correlation = (kept * other).sum() / kept.square().sum()
        assert abs(correlation) < 5 / kept.numel() ** 0.5, name


def test_streams_are_functions_of_all_parts_of_a_place():
    places = [("attention", 0), ("attention", 1), ("mlp", 0), (0, "dropout", 1), (1, "dropout", 0)]
    assert len({stream_of(*place) for place in places}) == len(places)
    assert stream_of("attention", 0) == -8804411205013989379  # a recorded run's masks stay


def test_shards_of_sequences_tokens_and_channels_have_the_mask_of_the_whole():
    x, stream = torch.randn(4, 12, 22), stream_of(3)
    whole = dropout(x, token_numbers(stream, 0, 4, 0, 12), 0.3, 5)
    for rows, columns, channels in ((slice(2, 4), slice(0, 12), 0), (slice(0, 4), slice(6, 12), 11)):
        part = token_numbers(
            stream, rows.start, rows.stop - rows.start, columns.start, columns.stop - columns.start
        )
        found = dropout(x[rows, columns, channels:], part, 0.3, 5, channels)
        assert torch.equal(found, whole[rows, columns, channels:])


def test_gradients_have_the_mask_of_the_outputs():
    x = torch.randn(4, 6, 10, dtype=torch.float64, requires_grad=True)
    tokens = numbers(4, 6)
    out = dropout(x, tokens, 0.25, 7)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad * x, out)
    assert torch.autograd.gradcheck(lambda x: dropout(x, tokens, 0.25, 7), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_dtype_has_the_same_mask(dtype):
    x = torch.randn(4, 6, 10).to(dtype) + 3
    out = dropout(x, numbers(4, 6), 0.5, 7)
    assert out.dtype == dtype
    assert torch.equal(out != 0, dropout(x.double(), numbers(4, 6), 0.5, 7) != 0)


def test_backward_keeps_the_numbers_alone():
    kept: list[Tensor] = []
    tokens = numbers(4, 6)
    x = torch.randn(4, 6, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        dropout(dropout(x, tokens, 0.5, 1), tokens, 0.5, 2)
    assert {x.data_ptr() for x in kept} == {tokens.data_ptr()}


def test_a_long_input_is_masked_in_parts(monkeypatch):
    from megakernel.ops import dropout as module

    x = torch.randn(20, 2, 40)
    whole = dropout(x, numbers(20, 2), 0.5, 1)
    monkeypatch.setattr(module, "_HASHES_AT_ONCE", 50)
    assert torch.equal(dropout(x, numbers(20, 2), 0.5, 1), whole)
