"""Evaluation that votes over draws of a learned kernel's noise (*Learning the Transformer Kernel*, section 4.1)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megakernel.attention.noise import Noise


def log_vote(model: nn.Module, predict: Callable[[], Tensor], draws: int | None) -> Tensor:
    """The log of the mean probability over draws, float64; what `predict` gives where `draws` is None.

    predict: runs `model` and gives log-probabilities.
    """
    if draws is None:
        return predict()
    return mean_over_draws(model, lambda: predict().double().exp(), draws).log()


@torch.no_grad()
def mean_over_draws(model: nn.Module, predict: Callable[[], Tensor], draws: int) -> Tensor:
    """The mean of `predict()` over draws of all noise that training redraws; the model ends as it began.

    predict: runs `model` and gives what is to be averaged, such as probabilities. A map whose numbers never change is
    trained with them and keeps them. The draws are numbered apart from those of training, and are the same in every
    call; a model without noise is asked once.

    Raises ValueError for draws below 1.
    """
    if draws < 1:
        raise ValueError(f"draws={draws}; expected at least 1")
    noises = [module for module in model.modules() if isinstance(module, Noise) and module.interval]
    if not noises:
        return predict()
    held = [(noise, noise.held, noise.values.clone()) for noise in noises]
    try:
        return torch.stack([_predict_with(noises, number, predict) for number in range(1, draws + 1)]).mean(0)
    finally:
        for noise, number, values in held:
            noise.held = number
            noise.values.copy_(values)


def _predict_with(noises: list[Noise], number: int, predict: Callable[[], Tensor]) -> Tensor:
    for noise in noises:
        noise.hold(-number)
    return predict()
