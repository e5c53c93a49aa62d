import pytest
import torch

from megakernel.config import UserError
from megakernel.generation import Sampling

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def drawn(sampling, count=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [sampling.draw(LOGITS, generator) for _ in range(count)]


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


def test_the_seed_determines_the_draws():
    assert drawn(Sampling(), seed=1) == drawn(Sampling(), seed=1) != drawn(Sampling(), seed=2)


@pytest.mark.parametrize("temperature", [1e-37, 1e-30, 1e-5])
def test_any_low_temperature_takes_the_likeliest(temperature):
    assert set(drawn(Sampling(temperature), 50)) == {1}
    draws = torch.Generator().manual_seed(0)
    tied = torch.tensor([1e4, -float("inf"), 1e4])
    assert {Sampling(temperature).draw(tied, draws) for _ in range(50)} == {0, 2}


@pytest.mark.parametrize("temperature", [1e-40, float("nan"), float("inf"), -float("inf")])
def test_a_temperature_is_one_that_float32_divides_by(temperature):
    with pytest.raises(UserError, match=r"temperature=.* cannot be; give 0 \(the likeliest token\) or more"):
        Sampling(temperature)


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_values_that_leave_no_token_are_refused_by_name(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)
