"""Averages and votes over draws of a learned kernel's noise (*Learning the Transformer Kernel*, section 4.1)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megakernel.attention.noise import Noise


def log_vote(model: nn.Module, predict: Callable[[], Tensor], draws: int | None) -> Tensor:
    """The log of the mean probability over draws, float64; the result of `predict` if `draws` is None.

    predict: runs `model` and returns log-probabilities.
    """
    if draws is None:
        return predict()
    return mean_over_draws(model, lambda: predict().double().exp(), draws).log()


@torch.no_grad()
def mean_over_draws(model: nn.Module, predict: Callable[[], Tensor], draws: int) -> Tensor:
    """The mean of `predict()` over the draws of `each_draw`.

    predict: runs `model` and returns what to average, such as probabilities.
    """
    return torch.stack(list(each_draw(model, predict, draws))).mean(0)


def each_draw(model: nn.Module, predict: Callable[[], Tensor], draws: int) -> Iterator[Tensor]:
    """`predict()` under each draw of all noise that training redraws; restores the model's noise at the end.

    Feature maps whose noise is never redrawn keep it. The draws differ from those of training and are the same in every
    call; a model without noise is run once.

    Raises ValueError for draws below 1.
    """
    if draws < 1:
        raise ValueError(f"draws={draws}; expected at least 1")
    noises = _noises(model)
    if not noises:
        yield predict()
        return
    held = [(noise, noise.draw_number, noise.values.clone()) for noise in noises]
    try:
        for number in range(1, draws + 1):
            for noise in noises:
                noise.use_draw(-number)
            yield predict()
    finally:
        for noise, number, values in held:
            noise.draw_number = number
            noise.values.copy_(values)


def vote_scores(targets: Tensor, likeliest: Tensor, logs: Tensor) -> dict[str, float | None]:
    """The scores of single draws and of their vote, for D draws of T predictions.

    accuracy: mean of single draws; voting_accuracy: of the majority (one of them in a tie); gain: their ratio, KL's
    AGV, None if no draw is ever right; inconsistency: share of predictions that differ from the majority, in %, KL's
    PI; deviation: std / |mean| of the label's logit log p / (1 - p) over the draws, the median over predictions, KL's
    RSD (which is a mean).

    targets: (T,) int64; -1 is no class. likeliest: the most probable classes, (D, T) int64. logs: log-probabilities of
    the targets, (D, T) float64.
    """
    voted = likeliest.mode(0).values
    single = (likeliest == targets).double().mean().item()
    voting = (voted == targets).double().mean().item()
    logits = logs - torch.log1p(-logs.exp()).clamp(min=-700)
    deviation = logits.std(0, correction=0) / logits.mean(0).abs()
    return {
        "accuracy": single,
        "voting_accuracy": voting,
        "gain": voting / single if single else None,
        "inconsistency": 100 * (likeliest != voted).double().mean().item(),
        "deviation": deviation.median().item(),
    }


def has_noise(model: nn.Module) -> bool:
    """Whether the model has noise that training redraws."""
    return bool(_noises(model))


def _noises(model: nn.Module) -> list[Noise]:
    return [module for module in model.modules() if isinstance(module, Noise) and module.interval]
