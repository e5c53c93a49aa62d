"""Batches for training and validation: who reads which rows, cut into pieces of the sequence, read ahead."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.objective import Objective, open_objective
from data_pipeline.order import ConsumptionOrder, Share, rows_by_pass
from megakernel.config.tree import Config


def _alone() -> None:
    """The barrier of a process that has nobody to wait for."""


class _Rows(Dataset[Batch]):
    """Samples as batches; what torch's DataLoader reads from."""

    def __init__(self, objective: Objective, share: Share):
        self._objective = objective
        self._share = share

    def __getitems__(self, indices: Sequence[int | None]) -> Batch:
        """The share's piece of these samples; None is a sample of which no label counts."""
        whole = self._objective.batch([index or 0 for index in indices])
        counts = torch.tensor([index is not None for index in indices])
        return whole.counting(counts).piece(self._share.piece_rank, self._share.piece_size)


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
        objective = open_objective(config, corpora, "train")
        if builds_index:
            objective.build(self._order.stream_length)
        barrier()
        self._rows = _Rows(objective, share)

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
        objective = open_objective(config, corpora, "validation")
        self.samples = min(config.training.eval_samples, objective.one_pass)
        """Samples of the set: training.eval_samples, or one pass over the corpora where they hold fewer."""
        if builds_index:
            objective.build(self.samples)
        barrier()
        self._rows = _Rows(objective, share)
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
