"""Does what lies far back help? The loss with the true far context, and with that of other documents in its place."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.order import Share
from data_pipeline.packed_text import NextTokens
from data_pipeline.samples import BlendedSamples

from .perplexity import STARTS, predict
from .result import Table, number
from .subject import OnPass, Subject


@dataclass(frozen=True)
class FarBucket:
    """The predictions at the beginning of one bucket of positions."""

    first: int
    """First position; `near` tokens before it are true, and what lies before them is what is exchanged."""

    last: int
    """Last position that is scored, at most 2 near - 1 behind the exchanged tokens."""

    tokens: int
    """Predictions."""

    loss: float
    """Mean cross entropy in nats with the true far context."""

    shuffled_loss: float
    """The same predictions', with tokens of other documents there."""

    @property
    def gain(self) -> float:
        """Nats per token by which the true far context helps."""
        return self.shuffled_loss - self.loss


@dataclass(frozen=True)
class FarContext:
    """The gain of a checkpoint by the far context."""

    task: str
    run: str
    step: int
    samples: int
    seq_len: int

    near: int
    """Tokens before a bucket that stay as they are."""

    buckets: list[FarBucket]
    """Buckets with a prediction."""

    def _mean(self, name: str) -> float:
        tokens = sum(bucket.tokens for bucket in self.buckets)
        return sum(getattr(bucket, name) * bucket.tokens for bucket in self.buckets) / tokens

    def scalars(self) -> dict[str, float]:
        """Means over all scored predictions, and each bucket's gain."""
        gains = {f"gain_from_{bucket.first}": bucket.gain for bucket in self.buckets}
        means = {name: self._mean(name) for name in ("loss", "shuffled_loss", "gain")} if self.buckets else {}
        return {**means, **gains}

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        tree = asdict(self)
        del tree["task"]
        for bucket, source in zip(tree["buckets"], self.buckets):
            bucket["gain"] = source.gain
        return tree

    def table(self) -> Table:
        """A row for each bucket."""
        rows = [
            (
                f"{bucket.first}-{bucket.last}",
                f"{bucket.tokens:,}",
                number(bucket.loss),
                number(bucket.shuffled_loss),
                f"{bucket.gain:+.4f}",
            )
            for bucket in self.buckets
        ]
        title = (
            f"{self.task}: {self.run} at step {self.step}: {self.samples} samples of {self.seq_len} tokens, the "
            f"{self.near} tokens before each bucket true"
        )
        below = () if self.buckets else ("no document reaches that far",)
        return Table(title, ("position", "predictions", "loss", "far shuffled", "gain"), rows, below=below)


def bucket_starts(near: int, seq_len: int) -> list[int]:
    """First positions, of the buckets of perplexity by position, that have something before the nearest `near`."""
    return [start for start in STARTS.tolist() if near < start < seq_len]


def measure_far(
    subject: Subject, samples: BlendedSamples, count: int, sequences: int, near: int, progress: OnPass
) -> list[FarBucket]:
    """The buckets, over the first `count` samples, whose index is built; `rows` of them in a forward pass.

    Raises UserError where a sample's corpus has no other document.
    """
    vocab_size = subject.tokenizer.vocab_size
    objective = NextTokens(samples, subject.config.data.isolate_documents)
    bos = -1 if samples.corpora[0].bos is None else samples.corpora[0].bos
    starts = bucket_starts(near, samples.seq_len)
    sums = {start: np.zeros(2) for start in starts}
    tokens = dict.fromkeys(starts, 0)
    last = dict.fromkeys(starts, 0)
    passes = range(0, count, sequences)
    for done, begun in enumerate(passes, start=1):
        indices = range(begun, min(begun + sequences, count))
        batch = objective.batch(indices, Share())
        others = torch.stack([_others(samples, index) for index in indices])
        for start in starts:
            scored = (
                batch.loss_mask
                & (batch.positions >= start)
                & (batch.positions < min(2 * start, start + near))
            )
            if not scored.any():
                continue
            # Nothing behind the last prediction has a part in it.
            end = int(scored.any(0).nonzero().max()) + 1
            # BOS, to which much of a model's attention goes, says nothing of what came before.
            far = (batch.positions < start - near) & (batch.tokens != bos)
            seen = (batch.tokens, others.where(far, batch.tokens))
            rest = (batch.positions, batch.labels, scored)
            for which, given in enumerate(seen):
                inputs = (part[:, :end].to(subject.device) for part in (given, *rest))
                losses = predict(subject.model, vocab_size, *inputs).losses
                sums[start][which] += float(losses.double().sum())
            tokens[start] += int(scored.sum())
            last[start] = max(last[start], int(batch.positions[scored].max()))
        progress(done, len(passes))
    return [
        FarBucket(start, last[start], tokens[start], *(sums[start] / tokens[start]).tolist())
        for start in starts
        if tokens[start]
    ]


def _others(samples: BlendedSamples, index: int) -> Tensor:
    """A sequence of tokens (N,) of documents that sample `index` has no part of; the same for every run."""
    corpus, place = samples.locate(index)
    rng = np.random.default_rng(index)
    return samples.corpora[corpus].others(place, samples.seq_len, rng)
