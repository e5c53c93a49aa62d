"""From finished stages to the report."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megakernel.config import Attention, BlockCompression, Config
from megakernel.model import LanguageModel
from megakernel.training.weight_source import WeightSource

from .ablations import SINKS, as_sliding_window, without_far, without_near
from .preflight import Preflight
from .report import Measured, Report
from .stages import Stage
from .validation import Validation

LONGEST_WINDOWED = 8192
"""Tokens per row up to which the sliding window is measured, which forms every pair of them."""


class Before(NamedTuple):
    """Losses in nats per token before the first step, of all tokens and of those beyond the near window."""

    parity: float | None
    identity_loss: float | None
    dense: tuple[float, float]
    swapped: tuple[float, float]
    sliding: tuple[float, float] | None
    """Of the dense model through a sliding window with sinks; None where rows are too long or cut in pieces."""


def measure_before(validation: Validation, source: WeightSource, found: Preflight) -> Before:
    """What is left to measure once the preflight is made."""
    config = validation.config
    window = near_window(config)
    dense = validation.model(source.model(), source)
    beyond = validation.loss(dense, window)
    sliding = None
    if validation.mesh.cp.size == 1 and config.training.evaluation_len <= LONGEST_WINDOWED:
        as_sliding_window(dense, window)
        sliding = (validation.loss(dense), validation.loss(dense, window))
    swapped = validation.loss(validation.model(config.model, source), window)
    return Before(
        parity=found.parity,
        identity_loss=found.identity_loss,
        dense=(found.dense_loss, beyond),
        swapped=(found.swapped_loss, swapped),
        sliding=sliding,
    )


def summarize(config: Config, plan: Sequence[Stage], validation: Validation, before: Before) -> Report:
    """Measure every stage's model and the parts of the last one; called on all ranks."""
    window = near_window(config)
    rows: list[Measured] = []
    ablations: list[Measured] = []
    tokens = 0

    def measured(name: str, model: LanguageModel, count: int, folder: Path | None) -> Measured:
        place = None if folder is None else str(folder)
        return Measured(name, validation.loss(model), validation.loss(model, window), count, place)

    for stage in plan:
        own = stage.config.training.consumed(stage.config.training.steps)[1]
        tokens = own if stage.is_control else tokens + own
        found = WeightSource.find("stage", stage.config.run.folder)
        model = validation.model(found.model(), found)
        row = measured(stage.purpose, model, tokens, stage.config.run.folder)
        (ablations if stage.is_control else rows).append(row)
    last = next(stage for stage in reversed(plan) if not stage.is_control)
    found = WeightSource.find("stage", last.config.run.folder)
    changes: list[tuple[str, Callable[[LanguageModel], bool]]] = [
        (f"{last.purpose}, far part off", without_far),
        (f"{last.purpose}, near window off", without_near),
    ]
    for name, change in changes:
        model = validation.model(found.model(), found)
        if change(model):
            ablations.append(measured(name, model, rows[-1].tokens, None))
    if before.sliding is not None:
        name = f"dense, sliding window of {window} tokens and {SINKS} sinks, untrained"
        ablations.append(Measured.untrained(name, before.sliding))
    transfer = next((stage for stage in plan if stage.config.objective.kind == "transfer"), None)
    return Report(
        config=str(config.run.folder),
        window=window,
        parity=before.parity,
        identity_loss=before.identity_loss,
        dense=Measured.untrained("dense", before.dense),
        swapped=Measured.untrained("swapped, untrained", before.swapped),
        stages=rows,
        ablations=ablations,
        heads={} if transfer is None else head_scalars(transfer.config.run.folder),
    )


def near_window(config: Config) -> int:
    """Tokens of the largest near window of the configured layers; 0 where there is none."""
    attentions = (config.model.layer_attention(layer) for layer in range(config.model.num_layers))
    return max((_window(attention) for attention in attentions), default=0)


def _window(attention: Attention) -> int:
    if attention.near is None:
        return 0
    size = attention.near.block_size
    if isinstance(attention.compression, BlockCompression):
        size = attention.compression.block_size
    return (size or 0) * attention.near.blocks


def head_scalars(run: Path) -> dict[str, float]:
    """The last `transfer/NAME/layer_L/head_H` scalars that a transfer run has logged."""
    found: dict[str, float] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found = {tag: value for tag, value in entry.items() if tag.startswith("transfer/")} or found
    return found


def worst_layers(heads: dict[str, float], count: int) -> list[int]:
    """The `count` layers of the largest mean error over heads, ascending: those that a hybrid keeps as softmax."""
    errors: dict[int, list[float]] = {}
    for tag, value in heads.items():
        _, name, layer, _ = tag.split("/")
        if name == "error":
            errors.setdefault(int(layer.removeprefix("layer_")), []).append(value)
    ordered = sorted(errors, key=lambda layer: (-sum(errors[layer]) / len(errors[layer]), layer))
    return sorted(ordered[:count])
