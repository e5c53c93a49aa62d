"""The counts of a task with answers, and their plot by length and depth."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
from torch import Tensor

from .result import Table, number


@dataclass(frozen=True)
class Cell:
    """Examples of one length and one depth."""

    length: int
    """Tokens of an example, at most."""

    depth: float | None
    """Of what is asked for, 0 at the start of the text; None: in no one place."""

    examples: int = 0
    answers: int = 0

    right: int = 0
    """Answers all of whose tokens are the likeliest, each with everything before it given."""

    tokens: int = 0
    """Tokens of answers."""

    right_tokens: int = 0

    loss_sum: float = 0.0
    """Cross entropy of all these tokens in nats."""

    def plus(self, starts: np.ndarray, losses: Tensor, right: Tensor) -> "Cell":
        """With one more example: where its answers begin among their tokens, and what was found of these."""
        return replace(
            self,
            examples=self.examples + 1,
            answers=self.answers + len(starts),
            right=self.right + int(np.logical_and.reduceat(right.numpy(), starts).sum()),
            tokens=self.tokens + len(right),
            right_tokens=self.right_tokens + int(right.sum()),
            loss_sum=self.loss_sum + float(losses.double().sum()),
        )

    @property
    def accuracy(self) -> float:
        """Share of the answers that are right."""
        return self.right / self.answers

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats of an answer's token."""
        return self.loss_sum / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """As plain values."""
        tree = asdict(self)
        del tree["loss_sum"]
        return {**tree, "accuracy": self.accuracy, "loss": self.loss}


def together(cells: Iterable[Cell]) -> Cell:
    """All of them as one, of the longest length."""
    cells = list(cells)
    sums = {
        key: sum(getattr(cell, key) for cell in cells)
        for key in ("examples", "answers", "right", "tokens", "right_tokens", "loss_sum")
    }
    return Cell(max(cell.length for cell in cells), None, **sums)


@dataclass(frozen=True)
class AnswerCounts:
    """A checkpoint's answers to one task."""

    task: str
    """As `--task` named it."""

    run: str
    """Folder of the run."""

    step: int
    """Optimizer steps behind the checkpoint."""

    cells: list[Cell]
    """By length, then depth."""

    @property
    def total(self) -> Cell:
        """All lengths and depths together."""
        return together(self.cells)

    @property
    def lengths(self) -> list[int]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(cell.length for cell in self.cells))

    @property
    def depths(self) -> list[float]:
        """From the start of the text to its end; empty where a task has none."""
        return sorted({cell.depth for cell in self.cells if cell.depth is not None})

    def at(self, length: int) -> Cell:
        """All depths of one length."""
        return together(cell for cell in self.cells if cell.length == length)

    def scalars(self) -> dict[str, float]:
        """Means over all examples, and the accuracy of each length where there are several."""
        total = self.total
        scalars = {
            "accuracy": total.accuracy,
            "loss": total.loss,
            "token_accuracy": total.right_tokens / total.tokens,
        }
        if len(self.lengths) > 1:
            scalars |= {f"accuracy_at_{length}": self.at(length).accuracy for length in self.lengths}
        return scalars

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "run": self.run,
            "step": self.step,
            **{key: value for key, value in self.total.as_dict().items() if key not in ("length", "depth")},
            "cells": [cell.as_dict() for cell in self.cells],
        }

    def table(self) -> Table:
        """A row for each length, with a column for each depth where there are depths."""
        rows = []
        for length in self.lengths:
            row = {cell.depth: cell for cell in self.cells if cell.length == length}
            found = self.at(length)
            by_depth = (f"{row[depth].accuracy:.0%}" if depth in row else "" for depth in self.depths)
            rows.append(
                (f"{length:,}", *by_depth, f"{found.answers:,}", f"{found.accuracy:.1%}", number(found.loss))
            )
        title = f"{self.task}: answers of {self.run} at step {self.step}"
        if self.depths:
            title += ", right by length and by depth of what is asked for"
        columns = ("length", *(f"{depth:.0%}" for depth in self.depths), "answers", "right", "loss")
        return Table(title, columns, rows, below=(f"{self.total.accuracy:.1%} of the answers are right",))


def heat_map(found: AnswerCounts) -> bytes | None:
    """A PNG, green where all answers are right and red where none is; None for a task without depths."""
    if not found.depths:
        return None
    from matplotlib.figure import Figure

    cells = {(cell.length, cell.depth): cell.accuracy for cell in found.cells}
    shares = [[cells[length, depth] for length in found.lengths] for depth in found.depths]
    size = (3 + 0.8 * len(found.lengths), 2 + 0.3 * len(found.depths))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(found.lengths)), [f"{length:,}" for length in found.lengths], rotation=45)
    axes.set_yticks(range(len(found.depths)), [f"{depth:.0%}" for depth in found.depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(f"{found.task}, step {found.step}", fontsize="small")
    for at, row in enumerate(shares):
        for place, share in enumerate(row):
            axes.text(place, at, f"{share:.0%}", ha="center", va="center", fontsize="x-small")
    figure.colorbar(image, label="right")
    plot = BytesIO()
    figure.savefig(plot, format="png", dpi=100)
    return plot.getvalue()
