"""Effects of the noise of learned kernels, over draws of it (KL, 4.1).

`voting`: inconsistency of predictions, and the gain of a vote (figure 5). `gradients`: the standard deviation and mean
size of gradients at the head's input (table 14). `kernel_deviation`: the relative standard deviation of phi(q).phi(k),
per head; the paper has only that of the model's output, as `voting` has.
"""

from functools import partial

import torch
from torch import Tensor

from megakernel.analysis.plots.subject import CapturedAttention, Subject
from megakernel.analysis.plots.table import Row
from megakernel.attention.flurka import FlurkaAttention
from megakernel.attention.kernel import KernelAttention
from megakernel.evaluation.voting import each_draw, has_noise, mean_over_draws, vote_scores
from megakernel.model import IGNORED, LanguageModel
from megakernel.model.layer_inputs import LayerInputs
from megakernel.ops.feature_maps import features
from megakernel.uptraining.sampled_queries import sample_queries


@torch.no_grad()
def measure_voting(subject: Subject) -> list[Row]:
    """The rows of `vote_rows` over the labels of all samples."""
    model = subject.model
    draws = [
        torch.stack(list(each_draw(model, partial(predictions, model, inputs), subject.draws)))
        for inputs in subject.model_inputs()
    ]
    correct, likeliest, logs = torch.cat(draws, -1).unbind(1)
    return vote_rows(correct.bool(), likeliest.long(), logs)


def predictions(model: LanguageModel, inputs: LayerInputs) -> Tensor:
    """(3, T) float64 for the labels that count: whether the likeliest class is correct, that class, log p(label)."""
    tokens, positions, labels, _ = inputs
    counted = labels != IGNORED
    if model.settings.model.classifier is not None:
        logs = model.log_probabilities(tokens, positions)[counted]
    else:
        logs = model.logits(model.hidden(tokens, positions))[counted].float().log_softmax(-1)
    targets = labels[counted]
    likeliest = logs.argmax(-1)
    of_label = logs.gather(-1, targets[:, None])[:, 0]
    return torch.stack([(likeliest == targets).double(), likeliest.double(), of_label.double()])


def vote_rows(correct: Tensor, likeliest: Tensor, logs: Tensor) -> list[Row]:
    """Rows for D draws of T predictions (D, T): the quality of a vote of the first 1, 2, 4, ... and of all draws.

    draws; the scores of `vote_scores`; loss: of the mean probability, in nats.
    """
    total = len(correct)
    targets = torch.where(correct, likeliest, -1).amax(0)  # -1: no draw is correct, so no vote can be
    counts = sorted({*(2**n for n in range(total.bit_length())), total})
    rows: list[Row] = []
    for count in counts:
        scores = vote_scores(targets, likeliest[:count], logs[:count])
        mean_logs = logs[:count].logsumexp(0) - torch.tensor(float(count)).log()
        row: Row = {name: "" if score is None else score for name, score in scores.items()}
        rows.append({"draws": count, **row, "loss": -mean_logs.mean().item()})
    return rows


def measure_gradients(subject: Subject) -> list[Row]:
    """neuron (of the hidden size); deviation and absolute_mean of its gradient over the draws.

    The gradient of the samples' mean loss with respect to the head's input, summed over tokens: that of a bias added
    there. As in the paper the mean is over absolute values; the paper's table has the means over neurons.
    """
    model_inputs = subject.model_inputs()
    model = subject.model

    def gradient() -> Tensor:
        return torch.stack([head_gradient(model, inputs) for inputs in model_inputs]).sum(0)

    return gradient_rows(torch.stack(list(each_draw(model, gradient, subject.draws))))


def head_gradient(model: LanguageModel, inputs: LayerInputs) -> Tensor:
    """The gradient of the loss with respect to a vector added to all inputs of the head, (C,) float64."""
    with torch.no_grad():
        hidden, *rest = model.body(inputs)
    with torch.enable_grad():
        hidden = hidden.detach().requires_grad_()
        output = model.layers[-1]((hidden, *rest))
        loss = output if output.dim() == 0 else output[0]  # a classifier's head also has its accuracy
        (gradient,) = torch.autograd.grad(loss, hidden)
    return gradient.double().sum((0, 1))


def gradient_rows(gradients: Tensor) -> list[Row]:
    """Rows of (D, C) gradients of D draws."""
    deviations, sizes = gradients.std(0, correction=0), gradients.abs().mean(0)
    return [
        {"neuron": neuron, "deviation": deviation, "absolute_mean": mean}
        for neuron, (deviation, mean) in enumerate(zip(deviations.tolist(), sizes.tolist()))
    ]


PAIRED_TOKENS = 64
"""Number of tokens per sequence whose queries and keys are paired."""


def measure_kernel_deviation(subject: Subject) -> list[Row]:
    """layer, head, sample, deviation: std / |mean| over the draws, the median over pairs of a query and a key."""
    return [
        {"layer": layer, "head": head, "sample": sample, "deviation": of_pairs.median().item()}
        for sample, layer, captured in subject.captured()
        if estimates_kernels(captured)
        for head, of_pairs in enumerate(kernel_deviations(captured, subject.draws).flatten(1))
    ]


def estimates_kernels(captured: CapturedAttention) -> bool:
    """Whether the layer compares queries and keys of tokens by random features that training redraws."""
    compares = isinstance(captured.core, (KernelAttention, FlurkaAttention))
    return compares and captured.core.keys_per_head == 1 and has_noise(captured.core)


@torch.no_grad()
def kernel_deviations(captured: CapturedAttention, draws: int) -> Tensor:
    """std / |mean| of phi(q).phi(k) over draws, for pairs of random tokens of the first sequence: (H, T, T) float64.

    Queries and keys are rotated for kernel attention, but not for FLuRKA, whose landmarks are not rotated.
    """
    core, inputs = captured.core, captured.inputs
    assert isinstance(core, (KernelAttention, FlurkaAttention))
    q, k = inputs.q[:1].double(), inputs.k[:1].double()
    if isinstance(core, KernelAttention):
        q, k = inputs.rotated_by_place(q, k)
    chosen = sample_queries(inputs.length, PAIRED_TOKENS, seed=0, step=0).to(q.device)
    # `features` takes (B, H, chunks, N, d): the query heads of a key head stand in place of chunks.
    queries = q[:, :, chosen].unflatten(1, (k.shape[1], -1))
    keys = k[:, :, None, chosen]

    def moments() -> Tensor:
        phi_q, phi_k = (
            phi.values if phi.log_scale is None else phi.values * phi.log_scale.exp()[..., None]
            for phi in (features(core.projection.feature_map, x, core.projection()) for x in (queries, keys))
        )
        estimates = (phi_q @ phi_k.transpose(-1, -2)).flatten(1, 2)[0]
        return torch.stack([estimates, estimates.square()])

    mean, square = mean_over_draws(core, moments, draws)
    return (square - mean.square()).clamp(min=0).sqrt() / mean.abs()
