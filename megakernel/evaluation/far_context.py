"""The benefit of the far context: the loss with the true one, and with tokens of other documents in its place."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_pipeline.order import Share
from data_pipeline.packed_text import NextTokens
from data_pipeline.samples import BlendedSamples
from megakernel.training.observing.console import decimal

from .perplexity import BUCKET_STARTS, predict
from .result import Table, number
from .subject import LoadedRun, OnPass


@dataclass(frozen=True)
class FarBucket:
    """The scored predictions of one bucket of positions, at its beginning."""

    first: int
    """First position; the `near` tokens before it are always true, those before them are replaced."""

    last: int
    """Last scored position; at most 2 near - 1 tokens lie between it and the replaced ones."""

    tokens: int
    """Number of predictions."""

    loss: float
    """Mean cross entropy in nats with the true far context."""

    shuffled_loss: float
    """The loss of the same predictions with tokens of other documents as far context."""

    @property
    def gain(self) -> float:
        """Reduction of the loss by the true far context, in nats per token."""
        return self.shuffled_loss - self.loss


@dataclass(frozen=True)
class FarContext:
    """A checkpoint's gain from the far context."""

    task: str
    run: str
    step: int
    samples: int
    seq_len: int

    near: int
    """Tokens before a bucket that are not replaced."""

    buckets: list[FarBucket]
    """Buckets that have predictions."""

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
        """One row per bucket."""
        rows = [
            (
                f"{bucket.first}-{bucket.last}",
                f"{bucket.tokens:,}",
                number(bucket.loss),
                number(bucket.shuffled_loss),
                decimal(bucket.gain, sign="+"),
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
    """First positions of the buckets (as of perplexity by position) that have more than `near` tokens before them."""
    return [start for start in BUCKET_STARTS.tolist() if near < start < seq_len]


def measure_far(
    subject: LoadedRun, samples: BlendedSamples, count: int, sequences: int, near: int, progress: OnPass
) -> list[FarBucket]:
    """The buckets over the first `count` samples, whose index exists; `sequences` of them per forward pass.

    Raises UserError if a sample's corpus has no other document.
    """
    vocab_size = subject.tokenizer.vocab_size
    objective = NextTokens(samples, subject.config.data.isolate_documents)
    bos = -1 if samples.corpora[0].bos is None else samples.corpora[0].bos
    starts = bucket_starts(near, samples.seq_len)
    sums = {start: np.zeros(2) for start in starts}
    tokens = dict.fromkeys(starts, 0)
    last = dict.fromkeys(starts, 0)
    passes = range(0, count, sequences)
    for done, first in enumerate(passes, start=1):
        indices = range(first, min(first + sequences, count))
        batch = objective.batch(indices, Share())
        foreign = torch.stack([_foreign_tokens(samples, index) for index in indices])
        for start in starts:
            stop = min(2 * start, start + near)
            scored = batch.loss_mask & (batch.positions >= start) & (batch.positions < stop)
            if not scored.any():
                continue
            # Tokens after the last prediction do not affect it.
            end = int(scored.any(0).nonzero().max()) + 1
            # Keep BOS: it carries no content, but much of a model's attention goes to it.
            far = (batch.positions < start - near) & (batch.tokens != bos)
            variants = (batch.tokens, foreign.where(far, batch.tokens))
            rest = (batch.positions, batch.labels, scored)
            for kind, ids in enumerate(variants):
                inputs = (part[:, :end].to(subject.device) for part in (ids, *rest))
                losses = predict(subject.model, vocab_size, *inputs).losses
                sums[start][kind] += float(losses.double().sum())
            tokens[start] += int(scored.sum())
            last[start] = max(last[start], int(batch.positions[scored].max()))
        progress(done, len(passes))
    return [
        FarBucket(start, last[start], tokens[start], *(sums[start] / tokens[start]).tolist())
        for start in starts
        if tokens[start]
    ]


def _foreign_tokens(samples: BlendedSamples, index: int) -> Tensor:
    """Tokens (N,) of documents that sample `index` does not overlap; the same for every run."""
    corpus, sample = samples.locate(index)
    rng = np.random.default_rng(index)
    return samples.corpora[corpus].foreign_tokens(sample, samples.seq_len, rng)
