"""The report of an up-training, as files, for TensorBoard and trackers: losses of each stage, and of ablations."""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megakernel.config import Config
from megakernel.model.vocabulary_loss import perplexity
from megakernel.training.observing.console import decimal
from megakernel.training.observing.event_files import drop_later_steps
from megakernel.training.observing.metrics_writer import StepMetrics
from megakernel.training.observing.trackers import Trackers
from megakernel.training.run_folder import write_atomically

from .costs import DecodingCost, TrainingCost, cost_tables
from .head_statistics import HeadTag
from .identity import Identity

REPORT = "uptrain_report"

HEADS = "## Heads"
"""The begin of the last part of the page: a row for each head, which are a thousand in a large model."""


@dataclass(frozen=True)
class Measured:
    """Losses of a model on the validation samples, in nats per token."""

    name: str
    """Short description of the model."""

    loss: float
    """Loss of all tokens."""

    beyond: float
    """Loss of the tokens further from their document's start than the local window."""

    tokens: int = 0
    """Training tokens since the dense model, or since initialization."""

    folder: str | None = None
    """The folder of its run; None if it is no run's model."""

    spent: TrainingCost | None = None
    """Its training cost; None if it is no run's model."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


LEAST_GAP = 0.01
"""Minimum perplexity gap, as a share of the dense model's perplexity, for which a recovered share is reported."""


def recovered(swapped: float, now: float, dense: float) -> float | None:
    """Share of the perplexity gap that is closed, (PPL_swapped - PPL) / (PPL_swapped - PPL_dense), from losses.

    None if the gap is less than LEAST_GAP of PPL_dense; nan if a loss is.
    """
    if swapped - dense < math.log1p(LEAST_GAP):
        return None
    # Both differences divided by PPL_swapped: the perplexity of a model that has diverged is no float.
    return math.expm1(min(now - swapped, 700.0)) / math.expm1(dense - swapped)


@dataclass(frozen=True)
class Report:
    """All measurements of an up-training."""

    config: str
    """The run's folder."""

    window: int
    """Tokens of the local window; 0 without one."""

    parity: float | None
    """Largest difference of logits, see `Parity`; None if not measured."""

    parity_reason: str
    """Why parity was not measured, or not for all layers."""

    identity: Identity | None
    """See `Preflight`."""

    dense: Measured
    swapped: Measured
    stages: Sequence[Measured]
    ablations: Sequence[Measured]
    heads: dict[str, float | None]
    """The last `transfer/...` scalars of the transfer stage; None for non-finite ones."""

    recipe: str = ""
    """The keys of the uptrain section that are not defaults."""

    kept: Sequence[int] = ()
    """Indices of the layers that stay as in the dense model."""

    decoding: dict[str, DecodingCost] = field(default_factory=dict)
    """Decoding cost of the dense model and of the student, by names of rows; empty if not measured."""

    trained_on: Measured | None = None
    """The dense model after training on as many tokens as the student; None if it was not trained."""

    @property
    def rows(self) -> list[Measured]:
        """All models, in the order of the table."""
        return [self.dense, self.swapped, *self.stages, *self.ablations]

    def recovered(self, row: Measured, end: Measured) -> float | None:
        """The share of the gap to `end` that a row closes; see `recovered`. None for the dense and swapped models."""
        if row in (self.dense, self.swapped):
            return None
        return recovered(self.swapped.loss, row.loss, end.loss)

    def write(self, folder: Path) -> None:
        """Write the JSON and Markdown files atomically."""
        write_atomically(folder / f"{REPORT}.json", json.dumps(self.as_dict(), indent=1) + "\n")
        write_atomically(folder / f"{REPORT}.md", self.markdown())

    def as_dict(self) -> dict[str, Any]:
        """The measurements and the recovered shares, for JSON."""
        rows = (*self.stages, *self.ablations)
        identity = None if self.identity is None else self.identity._asdict()
        tree = {
            **asdict(self),
            "identity": identity,
            "recovered": {row.name: self.recovered(row, self.dense) for row in rows},
        }
        if self.trained_on is not None:
            tree["recovered_of_trained_on"] = {row.name: self.recovered(row, self.trained_on) for row in rows}
        return tree

    def markdown(self) -> str:
        """The report as a page of Markdown."""
        more = place = ""
        if self.trained_on is not None:
            more = " of the dense model trained on |"
            place = "; the last column, of the gap to what the dense model became on as many tokens"
        parity = f"not measured: {self.parity_reason}"
        if self.parity is not None:
            parity = f"{self.parity:.1e}" + (f" ({self.parity_reason})" if self.parity_reason else "")
        lines = [
            f"# Up-training {self.config}",
            "",
            f"Validation loss in nats per token; *beyond* counts {_beyond(self.window)}. *recovered* is "
            "(PPL of the swapped model - PPL) / (PPL of the swapped model - PPL of the dense model), where the swap "
            f"costs at least {LEAST_GAP:.0%}{place}. *the swap lost nothing*: it costs less.",
            "",
            f"* Logits of the dense model against transformers, share of the largest: {parity}.",
            f"* {_identity(self.identity)}",
            *([f"* Up-trained with {self.recipe}."] if self.recipe else []),
            *([f"* Layers that stay softmax: {', '.join(map(str, self.kept))}."] if self.kept else []),
            "",
            f"| model | tokens | loss | perplexity | beyond | recovered |{more}",
            "| --- | ---: | ---: | ---: | ---: | ---: |" + (" ---: |" if more else ""),
        ]
        ends = [self.dense, *([] if self.trained_on is None else [self.trained_on])]
        for row in self.rows:
            is_end = row in (self.dense, self.swapped)
            shown = " | ".join("" if is_end else _in_words(self.recovered(row, end)) for end in ends)
            lines.append(
                f"| {row.name} | {row.tokens:,} | {decimal(row.loss)} | {row.perplexity:.3f} | "
                f"{decimal(row.beyond)} | {shown} |"
            )
        lines += cost_tables([(row.name, row.spent) for row in self.rows], self.decoding)
        if self.heads:
            lines += ["", f"{HEADS}, at the end of the transfer", "", *_head_table(self.heads)]
        return "\n".join(lines) + "\n"


def _head_table(heads: dict[str, float | None]) -> list[str]:
    """Table of the scalars under `HeadTag`s, with a row for each head and a column for each statistic."""
    rows: dict[tuple[int, int], dict[str, float | None]] = {}
    names: dict[str, None] = {}
    for tag, value in heads.items():
        name, layer, head = HeadTag.parse(tag)
        names[name] = None
        rows.setdefault((layer, head), {})[name] = value
    table = [
        f"| layer | head | {' | '.join(name.replace('_', ' ') for name in names)} |",
        "| ---: | ---: |" + " ---: |" * len(names),
    ]
    for (row, column), values in sorted(rows.items()):
        cells = ["" if (value := values.get(name)) is None else f"{value:.4g}" for name in names]
        table.append(f"| {row} | {column} | {' | '.join(cells)} |")
    return table


def _in_words(share: float | None) -> str:
    """A recovered share in words where a number would mislead: for a tiny gap, below 0 or above 1."""
    if share is None:
        return "the swap lost nothing"
    if math.isnan(share):
        return "unknown: a loss is not a number"
    if share < 0:
        return "none: worse than the swap"
    return "all, and more" if share > 1 else f"{share:.1%}"


def _beyond(window: int) -> str:
    if window == 0:
        return "all tokens, as there is no near window"
    return (
        f"the tokens with at least {window} tokens of their document before them, which a near window alone cannot "
        "connect with its start"
    )


def _identity(identity: Identity | None) -> str:
    if identity is None:
        return "Loss of a student whose windows cover the sequence: not measured."
    return (
        f"Loss of the first {identity.tokens} tokens of each sequence: of the dense model {identity.dense:.4f}, "
        f"of the student with windows over all of them {identity.student:.4f}."
    )


def write_events(report: Report, folder: Path) -> None:
    """Write the page as text, and each row's numbers as `report/loss/ROW` and so on, at its number of training tokens.

    Replaces those of an earlier report.
    """
    # Imported here because it takes seconds, which the other ranks need not wait.
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(exist_ok=True)
    drop_later_steps(folder, -1)
    with SummaryWriter(str(folder)) as events:
        events.add_text("report", report.markdown())
        for tokens, scalars in _scalars(report):
            for tag, value in scalars.items():
                events.add_scalar(tag, value, tokens)


def send(report: Report, config: Config, note: Callable[[str], None]) -> None:
    """Send the same to the trackers of an up-training, as a run beside those of its stages; note: prints a line."""
    if not config.logging.trackers:
        return
    folder = config.run.folder
    trackers = Trackers(config, folder, note, f"{folder.name}/report")
    for tokens, scalars in _scalars(report):
        trackers.write(tokens, StepMetrics(scalars))
    trackers.write(report.rows[-1].tokens, StepMetrics(texts={"report": report.markdown()}))
    trackers.close(failed=False)


def _scalars(report: Report) -> Iterator[tuple[int, dict[str, float]]]:
    """Training tokens, and numbers by tag, of each row."""
    for row in report.rows:
        numbers = {"loss": row.loss, "perplexity": row.perplexity, "beyond": row.beyond}
        if (share := report.recovered(row, report.dense)) is not None:
            numbers["recovered"] = share
        name = re.sub(r"[^\w.]+", "_", row.name)
        yield row.tokens, {f"report/{kind}/{name}": value for kind, value in numbers.items()}
