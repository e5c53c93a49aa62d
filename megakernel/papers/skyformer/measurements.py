"""Skyformer's measurements: approximations of softmax (its figure 1), and its instability score (appendix F, table 3).

`spectral_error`: the error of approximations of softmax attention on a run's own queries, keys and values. All
mechanisms are bidirectional, as in the paper, whatever the run's is, and have no learned weights: random features,
random projections, means. The number of features is the figure's d: samples, landmarks or compressed keys. `uniform`
is a trivial approximation, the mean of all values.

`instability`: the movement of outputs relative to that of the weights,
tau_i = |f(x_i, W_i) - f(x_i, W_{i-1})|_F^2 / |W_i - W_{i-1}|_F^2 over the first 20 steps of training, f the hidden
states after two layers and the final norm, in which the published encoder ends, as a ratio to that of softmax attention
at the same step. Models have the run's sizes, but at most two layers; weights outside attention start equal. The
optimizer is the run's, at its highest learning rate.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megakernel.analysis.plots.subject import CapturedAttention, Subject
from megakernel.analysis.plots.table import Row
from megakernel.attention import AttentionLayer, build, finish_step, redraw
from megakernel.attention.heads import generator
from megakernel.config import Attention, Model, Optimizer, expand_preset
from megakernel.model import IGNORED, LanguageModel
from megakernel.model.layer_inputs import LayerInputs
from megakernel.papers.skyformer.pseudo_inverse import exact_inverse, regularized_inverse

FEATURES = (16, 32, 64, 128, 256)
LENGTHS = (128, 256, 512)
"""Numbers of tokens from the start of a sequence; sequences shorter than the first are used as a whole."""


def measure_spectral_error(subject: Subject) -> list[Row]:
    """weights (trained or random), length, features, mechanism, layer, error (of `errors`)."""
    rows: list[Row] = []
    for weights, model in (("trained", subject.model), ("random", subject.untrained())):
        rows += model_errors(weights, model, subject)
    return rows


def model_errors(weights: str, model: LanguageModel, subject: Subject) -> list[Row]:
    """Rows with means over samples and heads, for each layer of `model` that has one key per token."""
    sums: dict[tuple[int, int, str, int], float] = {}
    for _, layer, captured in subject.captured(model):
        if captured.core.compresses_input or captured.core.keys_per_head != 1:
            continue
        q, k, v = rotated(captured)
        for length in lengths(q.shape[2]):
            for (mechanism, features), error in errors(*(x[:, :, :length] for x in (q, k, v))).items():
                key = (length, features, mechanism, layer)
                sums[key] = sums.get(key, 0.0) + error / len(subject.batches)
    names = ("length", "features", "mechanism", "layer")
    return [{"weights": weights, **dict(zip(names, key)), "error": error} for key, error in sums.items()]


def lengths(tokens: int) -> list[int]:
    """The LENGTHS up to `tokens`, or `tokens` if there is none."""
    return [length for length in LENGTHS if length <= tokens] or [tokens]


def rotated(captured: CapturedAttention) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, H, N, d) float64 of the first sequence, rotated, with keys and values repeated for query heads."""
    inputs = captured.inputs
    q, k = inputs.rotated_by_place(inputs.q[:1].double(), inputs.k[:1].double())
    keys, values = (x.repeat_interleave(inputs.group, 1) for x in (k, inputs.v[:1].double()))
    return q, keys, values


@torch.no_grad()
def errors(q: Tensor, k: Tensor, v: Tensor) -> dict[tuple[str, int], float]:
    """(mechanism, features) -> |O' - O|_2 / |O|_2, spectral norms of outputs (N, D), O of softmax; the mean over heads.

    q, k, v: (1, H, N, d) float64. Nyströmformer is left out if it would have more landmarks than tokens.
    """
    exact = encoder_layer("softmax", q)(q, k, v)
    uniform = v.mean(2, keepdim=True).expand_as(exact)
    result: dict[tuple[str, int], float] = {}
    for features in FEATURES:
        for name, output in outputs(q, k, v, features):
            result[name, features] = relative_error(output, exact)
        result["uniform", features] = relative_error(uniform, exact)
    return result


def relative_error(output: Tensor, exact: Tensor) -> float:
    """|O' - O|_2 / |O|_2 of (1, H, N, D), the mean over heads."""
    norms = torch.linalg.matrix_norm(torch.cat([output - exact, exact]), ord=2)
    return (norms[0] / norms[1]).mean().item()


def outputs(q: Tensor, k: Tensor, v: Tensor, features: int) -> Iterator[tuple[str, Tensor]]:
    """(name, output (1, H, N, D)) of each approximation with this many features."""
    rank = {"rank": features, "compress": "projected"}
    phi = {"samples": features}
    forms: dict[str, dict[str, Any]] = {
        "performer": {"feature_map": phi},
        "linformer": {"compression": rank},
        "flurka_performer": {"compression": rank, "feature_map": phi},
        "nystromformer": {"nystromformer": {"landmarks": features}},
    }
    for preset, changes in forms.items():
        if preset != "nystromformer" or features <= q.shape[2]:
            yield preset, encoder_layer({"preset": preset, **changes}, q)(q, k, v)
    landmarks = draw_landmarks(q, features)
    for name, invert in (("skyformer", regularized_inverse), ("skyformer, exact inverse", exact_inverse)):
        yield name, softmax_nystrom(q, k, v, landmarks, invert)


def draw_landmarks(q: Tensor, features: int) -> Tensor:
    """Indices (H, features) into the 2 N queries and keys of each head, with replacement; the same in every call."""
    heads, length = q.shape[1:3]
    generators = [generator(0, head, "landmarks") for head in range(heads)]
    draws = [torch.randint(2 * length, (features,), generator=random, device="cpu") for random in generators]
    return torch.stack(draws).to(q.device)


def softmax_nystrom(
    q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, invert: Callable[[Tensor], Tensor]
) -> Tensor:
    """Skyformer's approximation of softmax attention (1, H, N, D), as in its figure 1.

    Eq. 5 with the kernel A = exp(q.k / sqrt(d)) in place of the Gaussian, for A V and for the sums of A's rows.
    landmarks: indices (H, F) into [Q; K].
    """
    rows = torch.cat([q, k], 2).gather(2, landmarks[None, ..., None].expand(-1, -1, -1, q.shape[-1]))
    to_landmarks, between, from_keys = (
        (x @ y.transpose(-1, -2) * x.shape[-1] ** -0.5).exp() for x, y in ((q, rows), (rows, rows), (rows, k))
    )
    ones = torch.ones_like(v[..., :1])
    sums = to_landmarks @ (invert(between) @ (from_keys @ torch.cat([v, ones], -1)))
    return sums[..., :-1] / sums[..., -1:]


def encoder_layer(attention: str | dict[str, Any], q: Tensor) -> AttentionLayer:
    """An untrained bidirectional layer in float64 for queries (1, H, N, d)."""
    heads, length, width = q.shape[1:]
    core = build(attention, num_heads=heads, head_dim=width, causal=False, max_positions=length)
    return core.double().to(q.device).eval()


STEPS, LAYERS = 20, 2
RUN, REFERENCE = "run", "softmax"
OTHERS = ("gaussian", "kernelized", "skyformer", "nystromformer")
"""Presets that are compared with the run's own attention; bidirectional ones only in encoders."""


def measure_instability(subject: Subject) -> list[Row]:
    """step, mechanism, score, ratio (to softmax's score)."""
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
    """Name -> a model of the run's sizes with two layers of that attention; the run's own unless it is softmax."""
    small = model.model_copy(update={"num_layers": min(LAYERS, model.num_layers)})
    models = {} if all(layer.is_bare_softmax for layer in small.attentions) else {RUN: small}
    for preset in (REFERENCE, *OTHERS):
        attention = Attention.model_validate(expand_preset(preset))
        if not (model.is_causal and attention.mixes_future_tokens):
            models[preset] = small.model_copy(update={"attention": attention, "attention_pattern": None})
    return models


def instability(
    model: LanguageModel, model_inputs: Sequence[LayerInputs], optimizer: Optimizer
) -> list[float]:
    """tau of each of STEPS steps of `model`, which trains on the samples in turn."""
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
        before, old = hidden_states(model, batch), [weight.detach().clone() for weight in weights]
        update.step()
        moved = sum((new.detach() - was).double().square().sum() for new, was in zip(weights, old))
        shift = (hidden_states(model, batch) - before).square().sum()
        scores.append((shift / moved).item())
        update.zero_grad()
        with torch.no_grad():
            finish_step(model, lambda total: total)
    return scores


@torch.no_grad()
def hidden_states(model: LanguageModel, inputs: LayerInputs) -> Tensor:
    """The output of the final norm after the transformer layers; (N, B, C) float64."""
    for layer in model.layers[:-1]:
        inputs = layer(inputs)
    return inputs[0].double()
