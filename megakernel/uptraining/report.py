"""The report of an up-training, as files and for TensorBoard: what each stage gained, and what the parts are worth."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megakernel.training.observing.event_files import drop_later_steps
from megakernel.training.run_folder import write_whole

from .costs import Decoding, Spent, cost_pages
from .head_statistics import HeadTag
from .identity import Identity

REPORT = "uptrain_report"


@dataclass(frozen=True)
class Measured:
    """A model on the validation samples; nats per token."""

    name: str
    """What it is, in a few words."""

    loss: float
    """Of all tokens."""

    beyond: float
    """Of the tokens behind the near window of their document's start."""

    tokens: int = 0
    """Tokens trained on, from the dense model (or from nothing) on."""

    folder: str | None = None
    """Its run; None for what is no run."""

    spent: Spent | None = None
    """What its training took; None for what is no run."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


LEAST_GAP = 0.01
"""Share of the dense model's perplexity that a swap has to cost: of less, nothing can be said to be recovered."""


def recovered(swapped: float, now: float, dense: float) -> float | None:
    """Share of the perplexity gap that is closed: (PPL_swapped - PPL) / (PPL_swapped - PPL_dense), of losses.

    None where the gap is less than LEAST_GAP of PPL_dense.
    """
    gap = math.exp(swapped) - math.exp(dense)
    return (math.exp(swapped) - math.exp(now)) / gap if gap >= LEAST_GAP * math.exp(dense) else None


@dataclass(frozen=True)
class Report:
    """All that was measured, in the order of the table."""

    config: str
    """The run's folder."""

    window: int
    """Tokens of the near window; 0 without one."""

    parity: float | None
    """See `Parity`."""

    parity_reason: str
    """Why it is None, or not of all layers."""

    identity: Identity | None
    """See `Preflight`."""

    dense: Measured
    swapped: Measured
    stages: Sequence[Measured]
    ablations: Sequence[Measured]
    heads: dict[str, float]
    """The last `transfer/...` scalars of the transfer stage."""

    recipe: str = ""
    """What the uptrain section says, but for what it says anyway."""

    kept: Sequence[int] = ()
    """The layers that stay as the dense model has them, from 0."""

    decoding: dict[str, Decoding] = field(default_factory=dict)
    """What the dense model takes to decode, and the student, by their rows' names; empty where it is not known."""

    trained_on: Measured | None = None
    """The dense model after as many tokens as the student's; None where it was not trained on."""

    @property
    def rows(self) -> list[Measured]:
        """All models, in the order of the table."""
        return [self.dense, self.swapped, *self.stages, *self.ablations]

    def recovered(self, row: Measured, end: Measured) -> float | None:
        """The share of the gap to `end` that a row closes; see `recovered`. None of the two that begin the table."""
        if row in (self.dense, self.swapped):
            return None
        return recovered(self.swapped.loss, row.loss, end.loss)

    def write(self, folder: Path) -> None:
        """Both files, each whole or not at all."""
        write_whole(folder / f"{REPORT}.json", json.dumps(self.as_dict(), indent=1) + "\n")
        write_whole(folder / f"{REPORT}.md", self.markdown())

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the same numbers, with what follows from them."""
        rows = (*self.stages, *self.ablations)
        identity = None if self.identity is None else self.identity._asdict()
        found = {
            **asdict(self),
            "identity": identity,
            "recovered": {row.name: self.recovered(row, self.dense) for row in rows},
        }
        if self.trained_on is not None:
            found["recovered_of_trained_on"] = {
                row.name: self.recovered(row, self.trained_on) for row in rows
            }
        return found

    def markdown(self) -> str:
        """The page."""
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
                f"| {row.name} | {row.tokens:,} | {row.loss:.4f} | {row.perplexity:.3f} | {row.beyond:.4f} | {shown} |"
            )
        lines += cost_pages([(row.name, row.spent) for row in self.rows], self.decoding)
        if self.heads:
            lines += ["", "## Heads, at the end of the transfer", "", *_head_table(self.heads)]
        return "\n".join(lines) + "\n"


def _head_table(heads: dict[str, float]) -> list[str]:
    """Scalars under `HeadTag`s as a row for each head and a column for each name."""
    rows: dict[tuple[int, int], dict[str, float]] = {}
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
        cells = [f"{values[name]:.4g}" if name in values else "" for name in names]
        table.append(f"| {row} | {column} | {' | '.join(cells)} |")
    return table


def _in_words(share: float | None) -> str:
    """A recovered share as a reader takes it in: of a small gap shares are huge, and beyond its ends they mislead."""
    if share is None:
        return "the swap lost nothing"
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


def _identity(found: Identity | None) -> str:
    if found is None:
        return "Loss of a student whose windows cover the sequence: not measured."
    return (
        f"Loss of the first {found.tokens} tokens of each sequence: of the dense model {found.dense:.4f}, "
        f"of the student with windows over all of them {found.student:.4f}."
    )


def write_events(report: Report, folder: Path) -> None:
    """Write the page as text, and each row's numbers as `report/loss/ROW` and so on, at the tokens it was trained on.

    What an earlier report wrote there goes.
    """
    # Imported here because it takes seconds that the other ranks need not wait.
    from torch.utils.tensorboard import SummaryWriter

    folder.mkdir(exist_ok=True)
    drop_later_steps(folder, -1)
    with SummaryWriter(str(folder)) as events:
        events.add_text("report", report.markdown())
        for row in report.rows:
            numbers = {"loss": row.loss, "perplexity": row.perplexity, "beyond": row.beyond}
            if (share := report.recovered(row, report.dense)) is not None:
                numbers["recovered"] = share
            name = re.sub(r"[^\w.]+", "_", row.name)
            for kind, value in numbers.items():
                events.add_scalar(f"report/{kind}/{name}", value, row.tokens)
