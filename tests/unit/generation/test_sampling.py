import pytest
import torch

from megakernel.config import UserError
from megakernel.generation import Sampling
from megakernel.generation.sampling import Draw, choose, uniform

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def draw_tokens(sampling, count=400, seed=0, logits=LOGITS, seen=None):
    draws = [Draw(sampling, uniform(seed, number), seen) for number in range(count)]
    return choose(logits.expand(count, -1), draws)


def test_temperature_0_chooses_the_most_likely_token():
    assert set(draw_tokens(Sampling(temperature=0), 3)) == {1}


def test_draws_follow_the_distribution():
    frequencies = torch.bincount(torch.tensor(draw_tokens(Sampling(), 4000))) / 4000
    # Four standard deviations of a frequency over 4000 draws are at most 0.032.
    assert torch.allclose(frequencies, LOGITS.exp(), atol=0.032)


def test_a_low_temperature_sharpens_the_distribution():
    assert draw_tokens(Sampling(temperature=0.25)).count(1) > draw_tokens(Sampling()).count(1)


def test_top_k_and_top_p_keep_the_most_likely_tokens():
    assert set(draw_tokens(Sampling(top_k=2))) == {1, 3}
    assert set(draw_tokens(Sampling(top_p=0.5))) == {1}
    assert set(draw_tokens(Sampling(top_p=0.75 + 1e-3))) == {1, 2, 3}
    assert set(draw_tokens(Sampling(top_k=3, top_p=0.6))) == {1, 3}
    assert set(draw_tokens(Sampling(top_p=1e-300), 9)) == {1}, "smaller than any float32"


def test_logits_that_are_nan_do_not_affect_other_texts():
    broken = torch.full_like(LOGITS, float("nan"))
    first, second = choose(
        torch.stack([broken, LOGITS]), [Draw(Sampling(top_k=1), 0.5), Draw(Sampling(top_k=1), 0.5)]
    )
    assert 0 <= first < len(LOGITS)
    assert second == 1


def test_the_seed_determines_the_draws():
    assert (
        draw_tokens(Sampling(), seed=1) == draw_tokens(Sampling(), seed=1) != draw_tokens(Sampling(), seed=2)
    )


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-5])
def test_very_low_temperatures_choose_the_most_likely_token(temperature):
    assert set(draw_tokens(Sampling(temperature), 50)) == {1}
    tied = torch.tensor([1e4, -float("inf"), 1e4])
    assert set(draw_tokens(Sampling(temperature), 50, logits=tied)) == {0, 2}


def test_min_p_is_relative_to_the_most_likely_token():
    assert set(draw_tokens(Sampling(min_p=0.4))) == {1, 3}
    assert set(draw_tokens(Sampling(min_p=0.51))) == {1}
    assert set(draw_tokens(Sampling(min_p=0.21, top_k=3))) == {1, 2, 3}


def test_the_repetition_penalty_applies_to_tokens_of_the_text():
    logits = torch.tensor([2.0, 1.5, -1.0])
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert draw_tokens(greedy, 1, logits=logits, seen=torch.tensor([0])) == [1]
    assert draw_tokens(greedy, 1, logits=logits, seen=torch.tensor([0, 1])) == [0]
    # exp(2 / 2), exp(1.5), exp(-1 x 2): the penalty also lowers negative logits.
    frequencies = torch.bincount(
        torch.tensor(
            draw_tokens(Sampling(repetition_penalty=2.0), 4000, logits=logits, seen=torch.tensor([0, 2]))
        )
    )
    expected = torch.tensor([1.0, 1.5, -2.0]).softmax(0)
    assert torch.allclose(frequencies / 4000, expected, atol=0.032)


def test_each_text_of_a_batch_is_sampled_as_if_alone(draw):
    logits = torch.randn(6, 50, generator=draw)
    samplings = [
        *(Sampling(), Sampling(temperature=0), Sampling(0.5, top_k=5), Sampling(2.0, top_p=0.5)),
        *(Sampling(min_p=0.1), Sampling(repetition_penalty=1.5)),
    ]
    seen = [None] * 5 + [torch.arange(20)]
    draws = [
        Draw(sampling, uniform(7, row), seen_tokens)
        for row, (sampling, seen_tokens) in enumerate(zip(samplings, seen))
    ]
    alone = [choose(logits[row : row + 1], [draws[row]])[0] for row in range(6)]
    assert choose(logits, draws) == alone


@pytest.mark.parametrize("temperature", [1e-40, float("nan"), float("inf"), -float("inf")])
def test_temperatures_that_float32_cannot_divide_by_are_refused(temperature):
    with pytest.raises(
        UserError, match=r"temperature=.* is out of range; give 0 \(the most likely token\) or more"
    ):
        Sampling(temperature)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
    ],
)
def test_invalid_sampling_values_are_refused_by_name(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Sampling(**options)
