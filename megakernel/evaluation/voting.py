"""Averaging predictions over draws of a learned kernel's noise (*Learning the Transformer Kernel*, section 4.1)."""

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


def has_noise(model: nn.Module) -> bool:
    """Whether the model has noise that training redraws."""
    return bool(_noises(model))


def _noises(model: nn.Module) -> list[Noise]:
    return [module for module in model.modules() if isinstance(module, Noise) and module.interval]
