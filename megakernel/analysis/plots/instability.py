"""Skyformer's instability score: how far outputs move for a step of the weights (appendix F, table 3).

tau_i = |f(x_i, W_i) - f(x_i, W_{i-1})|_F^2 / |W_i - W_{i-1}|_F^2 over the first 20 steps of training, f the states
behind two layers, as a ratio to what softmax attention has at the same step. Models have the run's sizes, but two
layers at most; weights outside attention begin equal. The optimizer is the run's, at its highest learning rate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megakernel.attention import finish_step, redraw
from megakernel.config import Attention, Model, Optimizer, expand_preset
from megakernel.model import IGNORED, LanguageModel
from megakernel.model.layer_inputs import LayerInputs

from .subject import Subject
from .table import Row

STEPS, LAYERS = 20, 2
OWN, REFERENCE = "run", "softmax"
OTHERS = ("gaussian", "kernelized", "skyformer", "nystromformer")
"""Presets besides the run's own attention; those that see both ways in encoders alone."""


def measure(subject: Subject) -> list[Row]:
    """step, mechanism, score, ratio (to that of softmax)."""
    model_inputs = subject.model_inputs()
    scores = {
        name: instability(subject.untrained(model), model_inputs, subject.config.optimizer)
        for name, model in compared_models(subject.model.settings.model).items()
    }
    return [
        {"step": step, "mechanism": name, "score": score, "ratio": score / scores[REFERENCE][step - 1]}
        for name, of_steps in scores.items()
        for step, score in enumerate(of_steps, start=1)
    ]


def compared_models(model: Model) -> dict[str, Model]:
    """Name -> the run's model with two layers of another attention; the run's own where it is not softmax."""
    layers = min(LAYERS, model.num_layers)
    own = model.model_copy(update={"num_layers": layers})
    found = {} if all(own.layer_attention(i).is_full_softmax for i in range(layers)) else {OWN: own}
    for preset in (REFERENCE, *OTHERS):
        form = Attention.model_validate(expand_preset(preset))
        if not (model.is_causal and form.mixes_future_tokens):
            found[preset] = own.model_copy(update={"attention": form, "attention_pattern": None})
    return found


def instability(
    model: LanguageModel, model_inputs: Sequence[LayerInputs], optimizer: Optimizer
) -> list[float]:
    """tau of STEPS steps of `model`, whose batches are the samples in turn."""
    weights = list(model.parameters())
    update = torch.optim.AdamW(
        weights,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    scores = []
    for step in range(STEPS):
        *inputs, labels, _ = model_inputs[step % len(model_inputs)]
        batch = (*inputs, labels, (labels != IGNORED).sum().clamp(min=1).reshape(1))
        redraw(model, step)
        model.train()
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(weights, optimizer.clip_grad_norm)
        model.eval()
        before, old = states(model, batch), [weight.detach().clone() for weight in weights]
        update.step()
        moved = sum((new.detach() - was).double().square().sum() for new, was in zip(weights, old))
        shift = (states(model, batch) - before).square().sum()
        scores.append((shift / moved).item())
        update.zero_grad()
        with torch.no_grad():
            finish_step(model, lambda total: total)
    return scores


@torch.no_grad()
def states(model: LanguageModel, inputs: LayerInputs) -> Tensor:
    """The output of the last transformer layer, before the final norm; (N, B, C) float64."""
    for layer in model.walk[:-2]:
        inputs = layer(inputs)
    return inputs[0].double()
