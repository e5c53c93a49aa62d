import pytest
import torch

from megakernel.config import UserError
from megakernel.generation import Sampling
from megakernel.generation.sampling import Draw, choose, uniform

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def drawn(sampling, count=400, seed=0, logits=LOGITS, seen=None):
    draws = [Draw(sampling, uniform(seed, number), seen) for number in range(count)]
    return choose(logits.expand(count, -1), draws)


def test_temperature_0_takes_the_likeliest():
    assert set(drawn(Sampling(temperature=0), 3)) == {1}


def test_draws_follow_the_distribution():
    shares = torch.bincount(torch.tensor(drawn(Sampling(), 4000))) / 4000
    # Four standard deviations of a share estimated from 4000 draws are at most 0.032.
    assert torch.allclose(shares, LOGITS.exp(), atol=0.032)


def test_a_low_temperature_sharpens():
    assert drawn(Sampling(temperature=0.25)).count(1) > drawn(Sampling()).count(1)


def test_top_k_and_top_p_keep_the_likeliest():
    assert set(drawn(Sampling(top_k=2))) == {1, 3}
    assert set(drawn(Sampling(top_p=0.5))) == {1}
    assert set(drawn(Sampling(top_p=0.75 + 1e-3))) == {1, 2, 3}
    assert set(drawn(Sampling(top_k=3, top_p=0.6))) == {1, 3}
    assert set(drawn(Sampling(top_p=1e-300), 9)) == {1}, "float32 has no number as small"


def test_what_is_no_number_leaves_the_other_texts_alone():
    broken = torch.full_like(LOGITS, float("nan"))
    one, other = choose(
        torch.stack([broken, LOGITS]), [Draw(Sampling(top_k=1), 0.5), Draw(Sampling(top_k=1), 0.5)]
    )
    assert 0 <= one < len(LOGITS)
    assert other == 1


def test_the_seed_determines_the_draws():
    assert drawn(Sampling(), seed=1) == drawn(Sampling(), seed=1) != drawn(Sampling(), seed=2)


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-5])
def test_any_low_temperature_takes_the_likeliest(temperature):
    assert set(drawn(Sampling(temperature), 50)) == {1}
    tied = torch.tensor([1e4, -float("inf"), 1e4])
    assert set(drawn(Sampling(temperature), 50, logits=tied)) == {0, 2}


def test_min_p_keeps_what_is_likely_beside_the_likeliest():
    assert set(drawn(Sampling(min_p=0.4))) == {1, 3}
    assert set(drawn(Sampling(min_p=0.51))) == {1}
    assert set(drawn(Sampling(min_p=0.21, top_k=3))) == {1, 2, 3}


def test_a_penalty_meets_tokens_that_the_text_has():
    logits = torch.tensor([2.0, 1.5, -1.0])
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert drawn(greedy, 1, logits=logits, seen=torch.tensor([0])) == [1]
    assert drawn(greedy, 1, logits=logits, seen=torch.tensor([0, 1])) == [0]
    # exp(2 / 2), exp(1.5), exp(-1 x 2): the penalty also lowers what is below zero.
    shares = torch.bincount(
        torch.tensor(drawn(Sampling(repetition_penalty=2.0), 4000, logits=logits, seen=torch.tensor([0, 2])))
    )
    expected = torch.tensor([1.0, 1.5, -2.0]).softmax(0)
    assert torch.allclose(shares / 4000, expected, atol=0.032)


def test_a_row_is_drawn_as_if_it_stood_alone(draw):
    logits = torch.randn(6, 50, generator=draw)
    samplings = [
        *(Sampling(), Sampling(temperature=0), Sampling(0.5, top_k=5), Sampling(2.0, top_p=0.5)),
        *(Sampling(min_p=0.1), Sampling(repetition_penalty=1.5)),
    ]
    seen = [None] * 5 + [torch.arange(20)]
    draws = [Draw(sampling, uniform(7, row), met) for row, (sampling, met) in enumerate(zip(samplings, seen))]
    alone = [choose(logits[row : row + 1], [draws[row]])[0] for row in range(6)]
    assert choose(logits, draws) == alone


@pytest.mark.parametrize("temperature", [1e-40, float("nan"), float("inf"), -float("inf")])
def test_a_temperature_is_one_that_float32_divides_by(temperature):
    with pytest.raises(UserError, match=r"temperature=.* cannot be; give 0 \(the likeliest token\) or more"):
        Sampling(temperature)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
    ],
)
def test_values_that_leave_no_token_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)
