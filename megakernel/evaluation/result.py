"""What an evaluation measured."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PositionBucket:
    """Predictions from tokens at similar places in their documents."""

    first: int
    """First position of the bucket; position p sees p tokens before it."""

    last: int
    """Last position."""

    tokens: int
    """Predictions."""

    loss: float
    """Mean cross entropy in nats."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint's predictions of its validation samples."""

    run: str
    """Folder of the run, or what a baseline is called."""

    step: int
    """Optimizer steps behind the checkpoint; 0 for a baseline."""

    samples: int
    """Validation samples."""

    seq_len: int
    """Tokens per sample."""

    tokens: int
    """Predictions: labels that count, tokens or a classifier's examples."""

    loss: float
    """Mean cross entropy in nats per prediction."""

    bits_per_byte: float | None
    """The loss in bits per UTF-8 byte of the split's text; None but for a causal model, whose loss is a code length."""

    accuracy: float | None
    """Share of the predictions that are right, measured of classifiers and baselines."""

    by_position: list[PositionBucket]
    """The loss by position in the document (in the sample where documents are not isolated), empty buckets left out.

    A document that began before its sample counts from the sample's start: a position is what the model can see.
    Empty for classifiers, whose predictions have no positions, and baselines.
    """

    draws: int | None = None
    """Draws of the layers' noise over which probabilities were averaged; None: the noise that training held last."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        tree = asdict(self)
        buckets = tree.pop("by_position")
        for bucket, source in zip(buckets, self.by_position):
            bucket["perplexity"] = source.perplexity
        return {**tree, "perplexity": self.perplexity, "by_position": buckets}
