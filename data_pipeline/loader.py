"""Batches for training and validation: who reads which sequences, cut into shards of the sequence, read ahead."""

import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.objective import Objective, open_objective
from data_pipeline.order import ConsumptionOrder, Share, samples_by_pass
from data_pipeline.packing import Packing
from megakernel.config.training import Phase
from megakernel.config.tree import Config


def _alone() -> None:
    """The barrier of a process that has nobody to wait for."""


class _Samples(Dataset[Batch]):
    """Samples as batches; what torch's DataLoader reads from."""

    def __init__(self, objective: Objective, share: Share):
        self._objective = objective
        self._share = share

    def __getitems__(self, indices: Sequence[int | None]) -> Batch:
        """The share's shard of these samples; None is a sample of which no label counts."""
        batch = self._objective.batch([index or 0 for index in indices], self._share)
        return batch.counting(torch.tensor([index is not None for index in indices]))


class _PhaseBatches:
    """The batches of the steps of one phase."""

    def __init__(self, config: Config, corpora: Corpora, share: Share, phase: Phase):
        self.phase = phase
        self.order = ConsumptionOrder(phase, share)
        self.objective = open_objective(
            config, corpora, "train", phase.training.seq_len, f"{phase.key}.seq_len"
        )
        self.samples_of_pass = _Samples(self.objective, share)


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
        """Open the training corpora's sample indices, one for each length, built first where they are not there.

        builds_index: True on global rank 0 only. barrier: every process calls it once, between building and
        reading. Raises UserError for too little data and an index that cannot be written.
        """
        self._training = config.training
        self._num_workers = config.data.num_workers
        # All phases are opened now: too little text for the last length should not be found out after weeks.
        self._phases = [
            _PhaseBatches(config, corpora, share, phase)
            for phase in config.training.phases
            if phase.first_step < config.training.steps
        ]
        if builds_index:
            for batches in self._phases:
                batches.objective.samples.build(batches.order.stream_length(self._training.steps))
        barrier()

    def packing(self, step: int = 0) -> list[Packing]:
        """How the corpora's documents lie in sequences of each length that `step` or a later one reads."""
        ahead = [batches for batches in self._phases if batches.phase.end_step > step]
        by_length = {batches.phase.training.seq_len: batches.objective for batches in ahead}
        return [one for objective in by_length.values() for one in objective.samples.packing()]

    def from_step(self, step: int) -> Iterator[list[Batch]]:
        """The micro-batches of `step`, of the next step, ... to the last of training, read ahead within a phase."""
        for batches in self._phases:
            phase = batches.phase
            steps = range(max(step, phase.first_step), min(phase.end_step, self._training.steps))
            if steps:
                yield from self._read_ahead(batches, steps)

    def _read_ahead(self, of: _PhaseBatches, steps: range) -> Iterator[list[Batch]]:
        micro_batches = (indices for step in steps for indices in of.order.indices(step))
        loader: DataLoader[Batch] = DataLoader(
            of.samples_of_pass,
            batch_sampler=micro_batches,
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            worker_init_fn=_leave_requests_to_the_rank,
            # Forked workers share the imported libraries and mapped files; they touch no device.
            multiprocessing_context="fork" if self._num_workers else None,
            pin_memory=torch.cuda.is_available(),
            # The loader draws a seed at every start; drawn here, it does not move the model's random state.
            generator=torch.Generator(),
        )
        batches = iter(loader)
        while of_step := list(islice(batches, of.order.micro_batches_per_step)):
            yield of_step


class ValidationBatches:
    """A fixed set of validation samples: the same at every evaluation, in every layout, for every seed."""

    def __init__(
        self,
        config: Config,
        corpora: Corpora,
        share: Share,
        split: str = "validation",
        *,
        builds_index: bool = True,
        barrier: Callable[[], None] = _alone,
    ):
        """Open the sample index of the validation corpora's split; arguments and errors as for `TrainingBatches`."""
        key = "training.seq_len" if config.training.eval_seq_len is None else "training.eval_seq_len"
        objective = open_objective(config, corpora, split, config.training.evaluation_len, key)
        self.samples = min(config.training.eval_samples, objective.samples.one_pass)
        """Samples of the set: training.eval_samples, or one pass over the corpora where they hold fewer."""
        if builds_index:
            objective.samples.build(self.samples)
        barrier()
        self._read = _Samples(objective, share)
        self._passes = samples_by_pass(self.samples, config.training.micro_batch_size, share)

    def __len__(self) -> int:
        """Forward passes, the same number on every process."""
        return len(self._passes)

    def __iter__(self) -> Iterator[Batch]:
        """The micro-batches; sequences beyond the last sample have no label that counts."""
        for samples_of_pass in self._passes:
            yield self._read.__getitems__(
                [sample if sample < self.samples else None for sample in samples_of_pass]
            )


def _leave_requests_to_the_rank(worker: int) -> None:
    """A worker that a request to stop ended would take its rank along before it has saved. Slurm, a terminal and
    `kill -- -PGID` send such requests to every process; torch ends the workers with the rank."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch
