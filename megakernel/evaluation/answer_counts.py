"""Results of a synthetic task: counts of right answers, and their plot by length and depth."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from typing import Any

import numpy as np
from torch import Tensor

from .result import Table, number


@dataclass(frozen=True)
class Cell:
    """Counts over the examples of one length and one depth."""

    length: int
    """Maximum number of tokens of an example."""

    depth: float | None
    """Where the asked statement is hidden, from 0 (start of the text) to 1 (end); None: not in one place."""

    examples: int = 0
    answers: int = 0

    right: int = 0
    """Answers whose tokens are all the argmax of the logits, given the true tokens before them."""

    tokens: int = 0
    """Number of tokens of answers."""

    right_tokens: int = 0

    loss_sum: float = 0.0
    """Sum of the cross entropies of the answers' tokens, in nats."""

    def with_example(self, starts: np.ndarray, losses: Tensor, right: Tensor) -> "Cell":
        """The counts with one more example; starts: offsets of its answers in losses and right, both (tokens,)."""
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
        """Mean cross entropy of the answers' tokens, in nats."""
        return self.loss_sum / self.tokens

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        tree = asdict(self)
        del tree["loss_sum"]
        return {**tree, "accuracy": self.accuracy, "loss": self.loss}


def merge_cells(cells: Iterable[Cell]) -> Cell:
    """The sum of cells, with the longest length."""
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
    """The spec of `--task`."""

    run: str
    """Folder of the run."""

    step: int
    """Optimizer steps of the checkpoint."""

    cells: list[Cell]
    """Ordered by length, then depth."""

    @property
    def total(self) -> Cell:
        """All lengths and depths together."""
        return merge_cells(self.cells)

    @property
    def lengths(self) -> list[int]:
        """Lengths in the order of measurement."""
        return list(dict.fromkeys(cell.length for cell in self.cells))

    @property
    def depths(self) -> list[float]:
        """Depths in ascending order; empty if the task has none."""
        return sorted({cell.depth for cell in self.cells if cell.depth is not None})

    def at_length(self, length: int) -> Cell:
        """All depths of one length."""
        return merge_cells(cell for cell in self.cells if cell.length == length)

    def scalars(self) -> dict[str, float]:
        """Means over all examples, and the accuracy at each length if there are several."""
        total = self.total
        scalars = {
            "accuracy": total.accuracy,
            "loss": total.loss,
            "token_accuracy": total.right_tokens / total.tokens,
        }
        if len(self.lengths) > 1:
            scalars |= {f"accuracy_at_{length}": self.at_length(length).accuracy for length in self.lengths}
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
        """One row per length, with one column per depth, if any."""
        rows = []
        for length in self.lengths:
            row = {cell.depth: cell for cell in self.cells if cell.length == length}
            total = self.at_length(length)
            by_depth = (f"{row[depth].accuracy:.0%}" if depth in row else "" for depth in self.depths)
            rows.append(
                (f"{length:,}", *by_depth, f"{total.answers:,}", f"{total.accuracy:.1%}", number(total.loss))
            )
        title = f"{self.task}: answers of {self.run} at step {self.step}"
        if self.depths:
            title += ", accuracy by length and by depth of the statement"
        columns = ("length", *(f"{depth:.0%}" for depth in self.depths), "answers", "right", "loss")
        return Table(title, columns, rows, below=(f"{self.total.accuracy:.1%} of the answers are right",))


def heat_map(counts: AnswerCounts) -> bytes | None:
    """A PNG of accuracies by length and depth (green 1, red 0); None for a task without depths."""
    if not counts.depths:
        return None
    from matplotlib.figure import Figure

    cells = {(cell.length, cell.depth): cell.accuracy for cell in counts.cells}
    accuracies = [[cells[length, depth] for length in counts.lengths] for depth in counts.depths]
    size = (3 + 0.8 * len(counts.lengths), 2 + 0.3 * len(counts.depths))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(accuracies, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_xticks(range(len(counts.lengths)), [f"{length:,}" for length in counts.lengths], rotation=45)
    axes.set_yticks(range(len(counts.depths)), [f"{depth:.0%}" for depth in counts.depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(f"{counts.task}, step {counts.step}", fontsize="small")
    for y, row in enumerate(accuracies):
        for x, accuracy in enumerate(row):
            axes.text(x, y, f"{accuracy:.0%}", ha="center", va="center", fontsize="x-small")
    figure.colorbar(image, label="right")
    plot = BytesIO()
    figure.savefig(plot, format="png", dpi=100)
    return plot.getvalue()
