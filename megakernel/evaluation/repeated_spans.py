"""Does a model find again what it has read? The loss of a span of tokens, and that of the same span read again."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .perplexity import predict
from .result import Table, number
from .subject import OnPass, Subject

BEGINNING = 16
"""Tokens of the second reading that are not scored: they say which place is read again."""


@dataclass(frozen=True)
class RepeatedSpans:
    """The predictions of a checkpoint in spans that stand twice in a row."""

    task: str
    run: str
    step: int
    samples: int

    span: int
    """Tokens of a span, and from a token to the same one before."""

    first_loss: float
    """Mean cross entropy in nats of the first reading, without its first `BEGINNING` tokens."""

    second_loss: float
    """That of the second reading."""

    right: float
    """Share of the second reading's tokens that are the likeliest."""

    def scalars(self) -> dict[str, float]:
        """Both losses, by how much the second is lower, and how many are right."""
        gain = self.first_loss - self.second_loss
        return {"loss": self.second_loss, "first_loss": self.first_loss, "gain": gain, "accuracy": self.right}

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        tree = asdict(self)
        del tree["task"]
        return tree

    def table(self) -> Table:
        """A row for each reading."""
        title = f"{self.task}: {self.run} at step {self.step}: {self.samples} spans of {self.span} tokens, each twice"
        rows = [
            ("first", number(self.first_loss), ""),
            ("second", number(self.second_loss), f"{self.right:.1%}"),
        ]
        return Table(title, ("reading", "loss", "right"), rows)


def measure_repeated(
    subject: Subject, spans: Tensor, rows: int, progress: OnPass
) -> tuple[float, float, float]:
    """Mean losses in nats of the first and the second reading, and the share of right tokens in the second.

    spans: (samples, S) int64, S above BEGINNING + 1; `rows` of them in a forward pass.
    """
    length = spans.shape[1]
    scored = torch.zeros(2 * length - 1, dtype=torch.bool)
    scored[BEGINNING : length - 1] = scored[length + BEGINNING :] = True
    second = torch.arange(2 * length - 1)[scored] >= length
    sums = np.zeros(3)
    passes = spans.split(rows)
    for done, some in enumerate(passes, start=1):
        twice = torch.cat([some, some], 1)
        tokens, labels = twice[:, :-1], twice[:, 1:]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        chosen = scored.expand_as(tokens)
        inputs = (part.to(subject.device) for part in (tokens, positions, labels, chosen))
        found = predict(subject.model, subject.tokenizer.vocab_size, *inputs)
        again = second.repeat(len(some))
        losses = found.losses.double()
        sums += [float(losses[~again].sum()), float(losses[again].sum()), float(found.right[again].sum())]
        progress(done, len(passes))
    # Both readings score the same tokens.
    first_loss, second_loss, right = (sums / (len(spans) * (length - 1 - BEGINNING))).tolist()
    return first_loss, second_loss, right


def random_spans(count: int, length: int, vocab_size: int) -> Tensor:
    """Ids drawn evenly, (count, length) int64; the same for every run."""
    draw = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=draw)
