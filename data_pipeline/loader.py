"""Training and validation batches: each rank's samples, as context-parallel shards, prefetched."""

import atexit
import multiprocessing
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data_pipeline.batch import Batch
from data_pipeline.corpus import Corpora
from data_pipeline.examples import Cut
from data_pipeline.objective import SampleObjective, open_objective, open_training
from data_pipeline.order import ConsumptionOrder, Share, samples_by_pass
from data_pipeline.packing import Packing
from megakernel.config.data_phases import DataPhase, data_phases
from megakernel.config.tree import Config


class _BatchDataset(Dataset[Batch]):
    """Batches of samples, as a dataset for torch's DataLoader."""

    def __init__(self, objective: SampleObjective, share: Share):
        self._objective = objective
        self._share = share

    def __getitems__(self, indices: Sequence[int | None]) -> Batch:
        """The share's shard of these samples; None: a sample without a label that counts."""
        batch = self._objective.batch([index or 0 for index in indices], self._share)
        return batch.with_counted(torch.tensor([index is not None for index in indices]))


@dataclass(frozen=True)
class CorpusUse:
    """How much of a corpus a run reads."""

    key: str
    """The first key of the configuration that names it."""

    corpus: str

    share: float
    """Of the tokens that the run reads; of the examples, for a classifier or an encoder-decoder."""

    passes: float
    """Passes over the corpus in the whole run."""

    def __str__(self) -> str:
        return f"{self.corpus}: {100 * self.share:.4g} % of what is read, {self.passes:.2f} passes over it in the run"


class _PhaseBatches:
    """The batches of the steps of one phase and mixture."""

    def __init__(self, part: DataPhase, objective: SampleObjective, key: str, names: list[str], share: Share):
        """key: that of the mixture. names: those of its corpora."""
        self.phase = part.phase
        self.key, self.names = key, names
        self.order = ConsumptionOrder(part.phase, share)
        self.objective = objective
        self.dataset = _BatchDataset(objective, share)

    def read_counts(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (corpora,) that the first `steps` steps read of each corpus in this phase's stream, and passes."""
        samples, length = self.objective.samples, self.order.stream_length(steps)
        return samples.counts(length) * self.phase.training.seq_len, samples.passes(length)


class TrainingBatches:
    """The training batches of one rank; those of a step depend only on (seed, step) and the share."""

    def __init__(
        self,
        config: Config,
        corpora: Corpora,
        share: Share,
        *,
        builds_index: bool = True,
        barrier: Callable[[], None] = lambda: None,
    ):
        """Open the training corpora's sample indices, one per sequence length and mixture, and build missing ones.

        builds_index: whether to `build` now; one process does. barrier: called between building and reading.
        Raises UserError for too little data or an index that cannot be written.
        """
        self._training = config.training
        self._num_workers = config.data.num_workers
        parts = data_phases(config.data, config.training)
        # Open all phases now, so that too little text for the last length fails at the start, not after weeks.
        objectives = open_training(config, corpora, parts)
        self._phases = [
            _PhaseBatches(
                part,
                objective,
                config.data.key_of("train", part.mixture),
                [str(corpus) for corpus in corpora.stages[part.mixture]],
                share,
            )
            for part, objective in zip(parts, objectives)
            if part.phase.first_step < config.training.steps
        ]
        if builds_index:
            self.build()
        barrier()

    def build(self) -> None:
        """Build the sample indices that are missing; finished ones stay if this is interrupted."""
        for batches in self._phases:
            batches.objective.samples.build(batches.order.stream_length(self._training.steps))

    def use(self) -> list[CorpusUse]:
        """How much of each corpus the whole run reads."""
        tokens: Counter[str] = Counter()
        passes: defaultdict[str, float] = defaultdict(float)
        keys: dict[str, str] = {}
        # Of phases that share a stream, the last one counts all of it.
        for batches in {id(batches.objective): batches for batches in self._phases}.values():
            for name, count, share in zip(batches.names, *batches.read_counts(self._training.steps)):
                tokens[name] += int(count)
                passes[name] += share
                keys.setdefault(name, batches.key)
        return [CorpusUse(keys[name], name, tokens[name] / tokens.total(), passes[name]) for name in tokens]

    def packing(self, step: int = 0) -> list[Packing]:
        """Packing statistics of the corpora for each sequence length that `step` or a later step reads."""
        ahead = [batches for batches in self._phases if batches.phase.end_step > step]
        objectives = {id(batches.objective): batches.objective for batches in ahead}.values()
        found = [one for objective in objectives for one in objective.samples.packing()]
        return list({(one.seq_len, one.corpus): one for one in found}.values())

    def cut(self, step: int = 0) -> list[Cut]:
        """The documents longer than a sequence, of each corpus and length that `step` or a later step reads.

        None for packed text, where `packing` says what is cut.
        """
        ahead = {id(one.objective): one.objective for one in self._phases if one.phase.end_step > step}
        return list(dict.fromkeys(one for objective in ahead.values() for one in objective.cut()))

    def from_step(self, step: int) -> Generator[list[Batch], None, None]:
        """The micro-batches of each step from `step` to the end of training, prefetched within a phase."""
        for batches in self._phases:
            phase = batches.phase
            steps = range(max(step, phase.first_step), min(phase.end_step, self._training.steps))
            if steps:
                yield from self._read_ahead(batches, steps)

    def _read_ahead(self, phase_batches: _PhaseBatches, steps: range) -> Iterator[list[Batch]]:
        micro_batches = (indices for step in steps for indices in phase_batches.order.indices(step))
        loader: DataLoader[Batch] = DataLoader(
            phase_batches.dataset,
            batch_sampler=micro_batches,
            collate_fn=lambda batch: batch,
            num_workers=self._num_workers,
            worker_init_fn=_ignore_stop_signals,
            # Forked workers share imported libraries and mapped files; they do not use a device.
            multiprocessing_context="fork" if self._num_workers else None,
            pin_memory=torch.cuda.is_initialized(),
            # The loader draws a base seed at each start; its own generator leaves the global random state alone.
            generator=torch.Generator(),
        )
        batches = iter(loader)
        if self._num_workers:
            _end_workers_at_exit()
        while step_batches := list(islice(batches, phase_batches.order.micro_batches_per_step)):
            yield step_batches


class ValidationBatches:
    """A fixed set of validation samples, the same for every evaluation, layout and seed."""

    def __init__(
        self,
        config: Config,
        corpora: Corpora,
        share: Share,
        split: str = "validation",
        *,
        builds_index: bool = True,
        barrier: Callable[[], None] = lambda: None,
    ):
        """Open the sample index of the split; other arguments and errors as for `TrainingBatches`."""
        key = "training.seq_len" if config.training.eval_seq_len is None else "training.eval_seq_len"
        objective = open_objective(config, corpora, split, config.training.evaluation_len, key)
        self.samples = min(config.training.eval_samples, objective.samples.per_epoch)
        """Size of the set: training.eval_samples, or one pass over the corpora if they hold fewer."""
        self._objective = objective
        if builds_index:
            self.build()
        barrier()
        self._dataset = _BatchDataset(objective, share)
        self._micro_batch_size, self._share = config.training.micro_batch_size, share
        self._passes = samples_by_pass(self.samples, self._micro_batch_size, share)
        self.sources = [str(corpus) for corpus in corpora.of_split(split)]
        """Names of the corpora."""

    def build(self) -> None:
        """Build the sample indices that are missing."""
        self._objective.samples.build(self.samples)

    def __len__(self) -> int:
        """Number of forward passes, the same on every rank."""
        return len(self._passes)

    def __iter__(self) -> Iterator[Batch]:
        """The micro-batches; no label of a sequence beyond the last sample counts."""
        yield from self._batches(range(self.samples), self._passes)

    def by_source(self) -> Iterator[tuple[str, list[Batch]]]:
        """The name of each of several corpora, and the micro-batches of its samples alone; nothing of a single one.

        A corpus without a sample in the set is left out.
        """
        if len(self.sources) == 1:
            return
        of_corpora = [self._objective.samples.locate(sample)[0] for sample in range(self.samples)]
        for corpus, name in enumerate(self.sources):
            samples = [sample for sample, other in enumerate(of_corpora) if other == corpus]
            passes = samples_by_pass(len(samples), self._micro_batch_size, self._share)
            if samples:
                yield name, list(self._batches(samples, passes))

    def _batches(self, samples: Sequence[int], passes: Sequence[range]) -> Iterator[Batch]:
        for places in passes:
            yield self._dataset.__getitems__(
                [samples[place] if place < len(samples) else None for place in places]
            )


def _end_workers_at_exit() -> None:
    """Kill the workers that are left when this process ends, before Python waits for them.

    An error holds the frames that it passed, and in them the loader, whose end is what tells the workers to stop.
    Python would send them TERM, which they ignore, and then wait forever. Exit handlers run in reverse order, so this
    one must be registered after the workers have started.
    """
    atexit.unregister(_kill_workers)
    atexit.register(_kill_workers)


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


def _ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals, which Slurm, a terminal and `kill -- -PGID` send to every process: a worker that they end
    would crash its rank before it has saved. torch ends the workers with the rank."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
