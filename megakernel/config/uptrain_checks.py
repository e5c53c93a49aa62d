"""What an uptrain section asks of the others."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from .errors import Problem
from .init import Init
from .model import Model
from .objective import Objective
from .training import Schedule, Training
from .uptrain import Uptrain


def stages_share_a_schedule(uptrain: Uptrain | None, schedule: Schedule) -> Iterator[Problem]:
    """Parts of one schedule are not of the user's making."""
    if uptrain is None:
        return
    for key in ("steps_before", "steps_after"):
        if steps := getattr(schedule, key):
            yield Problem(f"schedule.{key}", steps, "is what stages of uptrain choose", "remove it")


def stages_are_measured(uptrain: Uptrain | None, training: Training) -> Iterator[Problem]:
    """The dense model and the stages are compared on validation samples."""
    if uptrain is not None and training.eval_samples == 0:
        reason = "leaves nothing to measure the dense model and the stages of uptrain on"
        yield Problem("training.eval_samples", 0, reason, "set more, such as 64")


def stages_lead_to_the_model(
    uptrain: Uptrain | None, init: Init, model: Model, objective: Objective, training: Training
) -> Iterator[Problem]:
    """A start, layers that are there, FLuRKA where a half of it comes first, and rows that grow."""
    if uptrain is None:
        return
    if init.source is None:
        remedy = "give the folder of a dense model or of a run"
        yield Problem("init.from", None, "is missing beside uptrain", remedy)
    if objective != Objective():
        remedy = "remove it; uptrain.distill says what the main stage lowers"
        yield Problem("objective.kind", objective.kind, "is what stages of uptrain choose", remedy)
    kept = uptrain.layers.keep
    if kept and model.attention_pattern is not None:
        remedy = "remove one of them"
        yield Problem("uptrain.layers.keep", kept, "and model.attention_pattern both place layers", remedy)
    largest = kept if isinstance(kept, int) else max(kept, default=-1) + 1
    if largest > model.num_layers:
        reason = f"names more layers than model.num_layers={model.num_layers}"
        yield Problem("uptrain.layers.keep", kept, reason, f"count layers from 0 to {model.num_layers - 1}")
    named = [] if isinstance(kept, int) else kept
    layers = (layer for layer in range(model.num_layers) if layer not in named)
    everything = kept == model.num_layers or all(
        model.layer_attention(layer).is_full_softmax for layer in layers
    )
    if everything and largest <= model.num_layers:
        remedy = "name a mechanism in model.attention, such as flurka, and keep fewer layers"
        yield Problem("uptrain.layers.keep", kept, "leaves every layer softmax: nothing to up-train", remedy)
    flurka = model.attention
    if uptrain.alpha > 0 and not (flurka.similarity == "kernel" and flurka.near and flurka.compression):
        reason = "trains a half of FLuRKA first, and model.attention is not FLuRKA"
        yield Problem("uptrain.alpha", uptrain.alpha, reason, "set 0 or model.attention: flurka")
    if uptrain.length is not None and uptrain.length.seq_len < training.seq_len:
        reason = f"is shorter than training.seq_len={training.seq_len}"
        yield Problem(
            "uptrain.length.seq_len", uptrain.length.seq_len, reason, f"set at least {training.seq_len}"
        )


def near_windows_have_gates(uptrain: Uptrain | None, model: Model) -> Iterator[Problem]:
    """What near dropout shuts."""
    if uptrain is not None and uptrain.near_dropout and not model.is_gated:
        remedy = "set 0, or near: {kind: softmax, join: gated} of model.attention"
        yield Problem(
            "uptrain.near_dropout", uptrain.near_dropout, "shuts gates, and the model has none", remedy
        )


def longer_rows(
    sections: Mapping[str, Any],
    known: Iterable[Problem],
    disagreements: Callable[[Mapping[str, Any]], Iterator[Problem]],
) -> Iterator[Problem]:
    """The problems, beside those `known`, of a configuration whose rows are those of uptrain.length.

    disagreements: of sections with each other. What uptrain.length sets is named by its keys there.
    """
    uptrain, model, training = (sections.get(name) for name in ("uptrain", "model", "training"))
    if uptrain is None or uptrain.length is None or model is None or training is None:
        return
    written = {
        name: value for name, value in uptrain.length if name in Training.model_fields and value is not None
    }
    keys = {f"training.{name}": f"uptrain.length.{name}" for name in written}
    if (rope_scaling := uptrain.length.rope_scaling) is not None:
        keys["model.rope_scaling"] = "uptrain.length.rope_scaling"
        model = model.model_copy(update={"rope_scaling": rope_scaling})
    training = training.model_copy(update=written)
    found = [problem.under("training") for problem in training.problems()]
    found += [problem.under("model") for problem in model.problems()]
    found += disagreements({**sections, "model": model, "training": training, "uptrain": None})
    for problem in found:
        if problem not in known:
            texts = {name: getattr(problem, name) for name in ("key", "reason", "remedy")}
            for key, own in keys.items():
                texts = {name: re.sub(rf"\b{re.escape(key)}\b", own, text) for name, text in texts.items()}
            yield replace(problem, **texts)
