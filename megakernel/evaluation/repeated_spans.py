"""Recall of repeated text: the loss of a span of tokens, and of the same span when it is repeated."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .perplexity import predict
from .result import Table, number
from .subject import LoadedRun, OnPass

UNSCORED = 16
"""Tokens at the start of each reading that are not scored: a model needs some to recognize the repetition."""


@dataclass(frozen=True)
class RepeatedSpans:
    """A checkpoint's losses on spans that occur twice in a row."""

    task: str
    run: str
    step: int
    samples: int

    span: int
    """Tokens of a span, which is also the distance from a token to its first occurrence."""

    first_loss: float
    """Mean cross entropy in nats of the first reading after `UNSCORED` tokens."""

    second_loss: float
    """The same of the second reading."""

    right: float
    """Share of the second reading's scored tokens that are the argmax of the logits."""

    def scalars(self) -> dict[str, float]:
        """Both losses, their difference, and the accuracy."""
        gain = self.first_loss - self.second_loss
        return {"loss": self.second_loss, "first_loss": self.first_loss, "gain": gain, "accuracy": self.right}

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        tree = asdict(self)
        del tree["task"]
        return tree

    def table(self) -> Table:
        """One row per reading."""
        title = f"{self.task}: {self.run} at step {self.step}: {self.samples} spans of {self.span} tokens, each twice"
        rows = [
            ("first", number(self.first_loss), ""),
            ("second", number(self.second_loss), f"{self.right:.1%}"),
        ]
        return Table(title, ("reading", "loss", "right"), rows)


def measure_repeated(
    subject: LoadedRun, spans: Tensor, sequences: int, progress: OnPass
) -> tuple[float, float, float]:
    """Mean losses in nats of the first and the second reading, and the share of right tokens in the second.

    spans: (samples, S) int64, S > UNSCORED + 1; `sequences` of them per forward pass.
    """
    length = spans.shape[1]
    scored = torch.zeros(2 * length - 1, dtype=torch.bool)
    scored[UNSCORED : length - 1] = scored[length + UNSCORED :] = True
    second = torch.arange(2 * length - 1)[scored] >= length
    sums = np.zeros(3)
    passes = spans.split(sequences)
    for done, chunk in enumerate(passes, start=1):
        twice = torch.cat([chunk, chunk], 1)
        tokens, labels = twice[:, :-1], twice[:, 1:]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        chosen = scored.expand_as(tokens)
        inputs = (part.to(subject.device) for part in (tokens, positions, labels, chosen))
        found = predict(subject.model, subject.tokenizer.vocab_size, *inputs)
        is_second = second.repeat(len(chunk))
        losses, right = found.losses.double(), found.right[is_second]
        sums += [float(losses[~is_second].sum()), float(losses[is_second].sum()), float(right.sum())]
        progress(done, len(passes))
    # Both readings score the same tokens.
    first_loss, second_loss, right = (sums / (len(spans) * (length - 1 - UNSCORED))).tolist()
    return first_loss, second_loss, right


def random_spans(count: int, length: int, vocab_size: int) -> Tensor:
    """Uniformly random ids, (count, length) int64; the same for every run."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=draw)
