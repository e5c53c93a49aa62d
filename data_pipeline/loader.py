"""Batches for training and validation: who reads which rows, cut into pieces of the sequence, read ahead."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.order import ConsumptionOrder, Share, rows_by_pass
from data_pipeline.samples import BlendedSamples
from megakernel.config.tree import Config


def _alone() -> None:
    """The barrier of a process that has nobody to wait for."""


class _Rows(Dataset[Batch]):
    """Rows of the stream as batches; what torch's DataLoader reads from."""

    def __init__(self, samples: BlendedSamples, share: Share, eod: int, isolate_documents: bool):
        self._samples = samples
        self._share = share
        self._eod = eod
        self._isolate_documents = isolate_documents

    def __getitems__(self, indices: Sequence[int | None]) -> Batch:
        """The share's piece of these samples; None is a row of which no label counts."""
        rows = torch.stack([self._samples[index or 0] for index in indices])
        batch = cut(rows, self._eod, self._isolate_documents, self._share)
        counts = torch.tensor([index is not None for index in indices])
        return Batch(batch.tokens, batch.labels, batch.loss_mask & counts[:, None], batch.positions)


def cut(rows: Tensor, eod: int, isolate_documents: bool, share: Share) -> Batch:
    """A share's piece of whole samples.

    rows: (B, seq_len + 1) int64. The end-of-document token belongs to the document it ends, so where
    documents are isolated the next token has position 0, and what follows an end is no label. Positions
    count from the start of the document or of the sample, whichever is later: a document that began on an
    earlier piece goes on at a position > 0.
    """
    tokens, labels = rows[:, :-1], rows[:, 1:]
    places = torch.arange(tokens.shape[1])
    if isolate_documents:
        ends = tokens == eod
        starts = torch.zeros_like(tokens)
        starts[:, 1:] = torch.where(ends[:, :-1], places[1:], 0)
        positions = places - starts.cummax(dim=1).values
        loss_mask = ~ends
    else:
        positions = places.expand_as(tokens)
        loss_mask = torch.ones_like(tokens, dtype=torch.bool)
    length = tokens.shape[1] // share.piece_size
    piece = slice(share.piece_rank * length, (share.piece_rank + 1) * length)
    return Batch(*(part[:, piece].contiguous() for part in (tokens, labels, loss_mask, positions)))


class TrainingBatches:
    """The training batches of one process; what a step reads depends on (seed, step) and the share alone."""

    def __init__(
        self,
        config: Config,
        corpora: Corpora,
        share: Share,
        *,
        builds_index: bool = True,
        barrier: Callable[[], None] = _alone,
    ):
        """Open the training corpora's sample index, built first where it is not there.

        builds_index: True on global rank 0 only. barrier: every process calls it once, between building and
        reading. Raises UserError for too little data and an index that cannot be written.
        """
        self._order = ConsumptionOrder(config.training, share)
        self._steps = config.training.steps
        self._num_workers = config.data.num_workers
        samples = BlendedSamples(
            corpora.train,
            "train",
            config.training.seq_len,
            config.run.seed,
            _index_cache(config),
            "data.train",
        )
        if builds_index:
            samples.build(self._order.stream_length)
        barrier()
        self._rows = _Rows(samples, share, corpora.eod, config.data.isolate_documents)

    def batches_for(self, step: int) -> list[Batch]:
        """The micro-batches of optimizer step `step` (from 0), read now."""
        return [self._rows.__getitems__(indices) for indices in self._order.indices(step)]

    def from_step(self, step: int) -> Iterator[list[Batch]]:
        """The micro-batches of `step`, of the next step, ... to the last of training, read ahead."""
        micro_batches = (indices for s in range(step, self._steps) for indices in self._order.indices(s))
        loader: DataLoader[Batch] = DataLoader(
            self._rows,
            batch_sampler=micro_batches,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            # Forked workers share the imported libraries and mapped files; they touch no device.
            multiprocessing_context="fork" if self._num_workers else None,
            pin_memory=torch.cuda.is_available(),
            # The loader draws a seed at every start; drawn here, it does not move the model's random state.
            generator=torch.Generator(),
        )
        batches = iter(loader)
        while of_step := list(islice(batches, self._order.micro_batches_per_step)):
            yield of_step


class ValidationBatches:
    """A fixed set of validation samples: the same at every evaluation, in every layout, for every seed."""

    def __init__(
        self,
        config: Config,
        corpora: Corpora,
        share: Share,
        *,
        builds_index: bool = True,
        barrier: Callable[[], None] = _alone,
    ):
        """Open the validation corpora's sample index; arguments and errors as for `TrainingBatches`."""
        key = "data.validation" if config.data.validation else "data.train"
        samples = BlendedSamples(
            corpora.validation, "validation", config.training.seq_len, 0, _index_cache(config), key
        )
        self.samples = min(config.training.eval_samples, samples.one_pass)
        """Samples of the set: training.eval_samples, or one pass over the corpora where they hold fewer."""
        if builds_index:
            samples.build(self.samples)
        barrier()
        self._rows = _Rows(samples, share, corpora.eod, config.data.isolate_documents)
        self._passes = rows_by_pass(self.samples, config.training.micro_batch_size, share)

    def __len__(self) -> int:
        """Forward passes, the same number on every process."""
        return len(self._passes)

    def __iter__(self) -> Iterator[Batch]:
        """The micro-batches; rows beyond the last sample have no label that counts."""
        for rows in self._passes:
            yield self._rows.__getitems__([row if row < self.samples else None for row in rows])


def _as_it_is(batch: Any) -> Any:
    return batch


def _index_cache(config: Config) -> Path:
    return config.data.index_cache or config.data.train[0].path / ".index_cache"
