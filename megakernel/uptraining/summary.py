"""Measurement of finished stages for the report."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megakernel.checkpoint.trained_run import DENSE
from megakernel.checkpoint.weight_source import WeightSource
from megakernel.config import Config, Model, Uptrain
from megakernel.model import LanguageModel
from megakernel.parallel.ranks import Ranks
from megakernel.training.observing.metrics_writer import read_metrics

from .ablations import SINKS, as_sliding_window, without_far, without_near
from .costs import DecodingCost, TrainingCost
from .head_statistics import HeadTag
from .identity import Preflight, near_window
from .report import Measured, Report
from .stages import MAIN, Stage
from .validation import Validation


def summarize(
    config: Config,
    plan: Sequence[Stage],
    kept: Sequence[int],
    validation: Validation,
    before: Preflight,
    source: WeightSource,
) -> Report:
    """Measure every stage's model and the ablations of the last one; called on all ranks.

    kept: layers that stay as in the dense model, `source`.
    """
    ranks = Ranks.of(validation.mesh)
    window = near_window(config)
    swapped = before.swapped
    uptrain = config.uptrain or Uptrain()
    if isinstance(uptrain.layers.keep, int) and kept:
        # The preflight swapped all layers, because those that stay softmax were chosen after the transfer.
        swapped = validation.losses(validation.model(wanted_model(config, plan), source), window)
    rows: list[Measured] = []
    ablations: list[Measured] = []
    trained_on: Measured | None = None
    decoding: dict[str, DecodingCost] = {}
    tokens = 0

    def measured(name: str, model: LanguageModel, count: int, folder: Path | None) -> Measured:
        losses = validation.losses(model, window)
        if folder is None:
            return Measured(name, *losses, count)
        spent = TrainingCost.of(folder) if validation.mesh.rank == 0 else None
        return Measured(name, *losses, count, str(folder), spent)

    def decode(name: str, model: LanguageModel) -> None:
        mesh = validation.mesh
        if mesh.rank == 0 and mesh.model.size == 1 and config.model.is_causal:
            decoding[name] = DecodingCost.of(model, config.training.evaluation_len, mesh.device)

    decode("dense", validation.model(source.model(), source))

    for stage in plan:
        stage_tokens = stage.config.training.consumed(stage.config.training.steps)[1]
        tokens = stage_tokens if stage.is_control else tokens + stage_tokens
        weights = WeightSource.find("stage", stage.config.run.folder, ranks)
        model = validation.model(weights.model(), weights)
        row = measured(stage.purpose, model, tokens, stage.config.run.folder)
        (ablations if stage.is_control else rows).append(row)
        if stage.kind == DENSE:
            trained_on = row
            if before.sliding is not None:
                as_sliding_window(model, window)
                ablations.append(measured(f"{row.name}, sliding window", model, tokens, None))
    last = next(stage for stage in reversed(plan) if not stage.is_control)
    weights = WeightSource.find("stage", last.config.run.folder, ranks)
    decode(last.purpose, validation.model(weights.model(), weights))
    changes: list[tuple[str, Callable[[LanguageModel], bool]]] = [
        (f"{last.purpose}, far part off", without_far),
        (f"{last.purpose}, near window off", without_near),
    ]
    for name, change in changes:
        model = validation.model(weights.model(), weights)
        if any(validation.mesh.all_reduce_max(change(model))):  # any pipeline stage may have such layers
            ablations.append(measured(name, model, rows[-1].tokens, None))
    if before.sliding is not None:
        name = f"dense, sliding window of {window} tokens and {SINKS} sinks, untrained"
        ablations.append(Measured(name, *before.sliding))
    transfer = next((stage for stage in plan if stage.config.objective.kind == "transfer"), None)
    return Report(
        config=str(config.run.folder),
        window=window,
        parity=before.parity.difference,
        parity_reason=before.parity.reason,
        identity=before.identity,
        dense=Measured("dense", *before.dense),
        swapped=Measured("swapped, untrained", *swapped),
        stages=rows,
        ablations=ablations,
        heads={} if transfer is None else head_scalars(transfer.config.run.folder),
        recipe=recipe(uptrain),
        kept=kept,
        decoding=decoding,
        trained_on=trained_on,
    )


def recipe(uptrain: Uptrain) -> str:
    """The keys of a section that are not defaults: `alpha=0.3, transfer={"steps": 6}`."""
    keys = uptrain.model_dump(mode="json", exclude_defaults=True)
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())


def wanted_model(config: Config, plan: Sequence[Stage]) -> Model:
    """The model of the main stage, with the layers that stay softmax; the configured one before the plan has it."""
    return next((stage.config.model for stage in plan if stage.kind == MAIN), config.model)


def head_scalars(run: Path) -> dict[str, float | None]:
    """The last logged scalars of a transfer run under `HeadTag`s; None for non-finite ones."""
    last: dict[str, float | None] = {}
    for entry in read_metrics(run):
        last = {tag: value for tag, value in entry.items() if tag.startswith("transfer/")} or last
    return last


def worst_layers(heads: Mapping[str, float | None], count: int) -> list[int]:
    """The `count` layers with the largest mean error over heads, ascending, which a hybrid keeps as softmax.

    A non-finite error, None, is the largest.
    """
    errors: dict[int, list[float]] = {}
    for tag, value in heads.items():
        name, layer, _ = HeadTag.parse(tag)
        if name == "error":
            errors.setdefault(layer, []).append(math.inf if value is None else value)
    ordered = sorted(errors, key=lambda layer: (-sum(errors[layer]) / len(errors[layer]), layer))
    return sorted(ordered[:count])
