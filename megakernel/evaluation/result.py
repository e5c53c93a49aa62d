"""The result of `--task lm`, and the tables that the terminal and TensorBoard show."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megakernel.model.vocabulary_loss import perplexity
from megakernel.training.observing.console import decimal


class Table(NamedTuple):
    """A table of text, with a title above and lines below."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    total: tuple[str, ...] | None = None
    """A last row with totals."""

    below: tuple[str, ...] = ()
    """Lines below the table."""

    def markdown(self) -> str:
        """The table in Markdown, for TensorBoard."""
        rows = [*self.rows, *([self.total] if self.total else [])]
        rule = ("---",) * len(self.columns)
        lines = [" | ".join(map(_cell, row)) for row in [self.columns, rule, *rows]]
        return "\n\n".join([self.title, "\n".join(f"| {line} |" for line in lines), *self.below])


def _cell(text: str) -> str:
    """A text in a row of Markdown, where a bar would end its cell and a newline the table."""
    return re.sub(r"\r\n|\r|\n", "<br>", text.replace("|", r"\|"))


def number(value: float | None, digits: int = 4) -> str:
    """A number as text; empty for None."""
    return "" if value is None else decimal(value, digits)


@dataclass(frozen=True)
class PositionBucket:
    """Predictions from tokens at similar positions in their documents."""

    first: int
    """First position of the bucket; position p sees p tokens before it."""

    last: int
    """Last position."""

    tokens: int
    """Number of predictions."""

    loss: float
    """Mean cross entropy in nats."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's loss on the samples of a split."""

    run: str
    """Folder of the run, or a baseline's name."""

    step: int
    """Optimizer steps of the checkpoint; 0 for a baseline."""

    samples: int
    """Number of samples."""

    seq_len: int
    """Tokens per sample."""

    tokens: int
    """Number of predictions: valid tokens, or a classifier's examples."""

    loss: float
    """Mean cross entropy in nats per prediction; for a regression, the mean squared error."""

    bits_per_byte: float | None
    """The loss in bits per UTF-8 byte of the split's text; None unless a causal model's loss is a code length."""

    accuracy: float | None
    """Share of right predictions, for classifiers and baselines."""

    by_position: list[PositionBucket]
    """The loss by position in the document (in the sample if documents are not isolated), without empty buckets.

    Positions of a document that began before its sample count from the sample's start, since a position is the number
    of tokens that the model sees. Empty for baselines, and for classifiers, whose predictions have no positions.
    """

    draws: int | None = None
    """Draws of the layers' noise over which probabilities were averaged; None: the checkpoint's noise."""

    stride: int | None = None
    """Stride in tokens of sliding windows, which predict each token once; None: disjoint samples."""

    split: str = "validation"
    """Split of the corpora."""

    scores: dict[str, float] | None = None
    """For a classifier, Matthews' correlation and, with two classes, F1; for a regression, Pearson's and Spearman's."""

    vote: dict[str, float | None] | None = None
    """For a classifier with draws, accuracy of single draws and of their majority, gain, inconsistency and deviation.

    See `vote_scores`. `accuracy` above is that of the mean probabilities.
    """

    @property
    def is_regression(self) -> bool:
        """Whether numbers are predicted; their loss has no perplexity."""
        return self.scores is not None and self.accuracy is None

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)

    def scalars(self) -> dict[str, float]:
        """Means over all predictions."""
        scalars = {"loss": self.loss}
        if not self.is_regression:
            scalars["perplexity"] = self.perplexity
        optional = {"bits_per_byte": self.bits_per_byte, "accuracy": self.accuracy, **(self.scores or {})}
        optional |= {f"vote/{name}": value for name, value in (self.vote or {}).items()}
        return scalars | {name: value for name, value in optional.items() if value is not None}

    def table(self) -> Table:
        """One row per bucket of positions."""
        title = f"{self.run} at step {self.step}: {self.samples} samples of {self.seq_len} tokens"
        if self.split != "validation":
            title += f" of {self.split}"
        if self.stride is not None:
            title += f", each {self.stride} tokens after the one before"
        if self.draws is not None:
            title += f"\nprobabilities are means over {self.draws} draws of the layers' noise"
        rows = [
            _row(f"{bucket.first}-{bucket.last}", bucket.tokens, bucket.loss, bucket.perplexity)
            for bucket in self.by_position
        ]
        below = []
        if self.bits_per_byte is not None:
            below.append(f"{decimal(self.bits_per_byte)} bits/byte")
        if self.accuracy is not None:
            below.append(f"accuracy {self.accuracy:.1%}")
        below += [f"{name} {decimal(score)}" for name, score in (self.scores or {}).items()]
        if self.vote is not None:
            below += _vote_lines(self.vote)
        columns: tuple[str, ...] = ("position", "predictions", "loss", "perplexity")
        total = _row("all", self.tokens, self.loss, self.perplexity)
        if self.is_regression:
            columns, total = columns[:-1], total[:-1]
        return Table(title, columns, rows, total, tuple(below))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        tree = asdict(self)
        buckets = tree.pop("by_position")
        for bucket, source in zip(buckets, self.by_position):
            bucket["perplexity"] = source.perplexity
        return {**tree, "perplexity": self.perplexity, "by_position": buckets}


def _row(positions: str, tokens: int, loss: float, perplexity: float) -> tuple[str, ...]:
    return positions, f"{tokens:,}", decimal(loss), f"{perplexity:.2f}"


def _vote_lines(vote: dict[str, float | None]) -> list[str]:
    gain = "" if vote["gain"] is None else f", gain {vote['gain']:.3f}"
    return [
        f"single draws: accuracy {vote['accuracy']:.1%}; their vote: {vote['voting_accuracy']:.1%}{gain}",
        f"inconsistency {number(vote['inconsistency'], 2)} %, deviation {number(vote['deviation'])}",
    ]
