import pytest
import torch

from megakernel.attention import build, redraw
from megakernel.evaluation.voting import mean_over_draws


def outputs(name: str, draws: int):
    module = build({"similarity": "kernel", "feature_map": {"name": name}}, num_heads=2, head_dim=4).eval()
    redraw(module, 250)
    q, k, v = torch.randn(3, 1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    return module, lambda: module(q, k, v), draws


def test_the_vote_is_the_mean_over_draws_and_the_model_ends_as_it_began():
    module, predict, draws = outputs("gmm_prf", 4)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    seen = []

    def listening():
        seen.append(predict())
        return seen[-1]

    vote = mean_over_draws(module, listening, draws)
    torch.testing.assert_close(vote, torch.stack(seen).mean(0))
    assert len(seen) == draws
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    held = predict()
    redraw(module, 299)
    assert torch.equal(predict(), held)


def test_more_draws_bring_the_vote_closer_to_the_kernel_itself():
    module, predict, _ = outputs("gmm_rks", 0)
    exact = mean_over_draws(module, predict, 500)

    def error(draws: int) -> float:
        return (mean_over_draws(module, predict, draws) - exact).norm().item()

    assert error(64) < error(1) / 2


def test_numbers_that_a_model_was_trained_with_are_kept():
    module, predict, _ = outputs("favor", 0)
    assert torch.equal(mean_over_draws(module, predict, 3), predict())


def test_no_draws_are_refused():
    with pytest.raises(ValueError, match="draws=0"):
        mean_over_draws(torch.nn.Identity(), lambda: torch.zeros(1), 0)
