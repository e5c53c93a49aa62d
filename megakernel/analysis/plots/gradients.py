"""Gradients that reach the head over draws of the noise: their standard deviation and mean size (KL, table 14)."""

import torch
from torch import Tensor

from megakernel.evaluation.voting import each_draw
from megakernel.model import LanguageModel
from megakernel.model.layer_inputs import LayerInputs

from .subject import Subject
from .table import Row


def measure(subject: Subject) -> list[Row]:
    """neuron (of the hidden size); deviation and absolute_mean of its gradient over the draws.

    The gradient of the samples' mean loss by what the head reads, summed over tokens: that of a bias added there. As in
    the paper the mean is over absolute values; its table has the means over neurons.
    """
    model_inputs = subject.model_inputs()
    model = subject.model

    def gradient() -> Tensor:
        return torch.stack([head_gradient(model, inputs) for inputs in model_inputs]).sum(0)

    return gradient_rows(torch.stack(list(each_draw(model, gradient, subject.draws))))


def head_gradient(model: LanguageModel, inputs: LayerInputs) -> Tensor:
    """The gradient of the loss by a vector added to all states that enter the head, (C,) float64."""
    with torch.no_grad():
        hidden, *rest = model.body(inputs)
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        measured = model.walk[-1]((hidden, *rest))
        loss = measured if measured.dim() == 0 else measured[0]  # a classifier's head also tells its accuracy
        (found,) = torch.autograd.grad(loss, hidden)
    return found.double().sum((0, 1))


def gradient_rows(gradients: Tensor) -> list[Row]:
    """Rows of (D, C) gradients of D draws."""
    scatter, size = gradients.std(0, correction=0), gradients.abs().mean(0)
    return [
        {"neuron": neuron, "deviation": deviation, "absolute_mean": mean}
        for neuron, (deviation, mean) in enumerate(zip(scatter.tolist(), size.tolist()))
    ]
