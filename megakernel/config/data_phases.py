"""Which corpora a run reads when: its phases of sequence lengths, cut where another mixture begins."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .data import Corpus, Data
from .training import Phase, Training


@dataclass(frozen=True)
class TextMixture:
    """Corpora with their weights, from one step of the run on."""

    key: str
    """Key that configures it: `data.train`, or `data.stages.0.train`."""

    first_step: int
    corpora: list[Corpus]


@dataclass(frozen=True)
class DataPhase:
    """Steps that read one mixture in sequences of one length, as a stream of its own.

    Phases that differ only in their batch sizes continue a stream.
    """

    phase: Phase
    """The steps, and the samples of the stream."""

    mixture: int
    """Index of the mixture in `mixtures`."""

    planned_end: int | None
    """Samples consumed by the end of its sequence length, as planned when the run began; None: it had no end."""


def mixtures(data: Data, training: Training) -> list[TextMixture]:
    """The mixtures of a run: data.train, and those of data.stages."""
    found = [TextMixture("data.train", 0, data.train)]
    for index, stage in enumerate(data.stages):
        first = stage.from_step if stage.from_tokens is None else training.steps_for(stage.from_tokens)
        assert first is not None, "one of the two is given"
        found.append(TextMixture(f"data.stages.{index}.train", first, stage.train))
    return found


def data_phases(data: Data, training: Training) -> list[DataPhase]:
    """The phases of `training` cut where mixtures begin, in order, also those behind training.steps."""
    starts = [mixture.first_step for mixture in mixtures(data, training)]
    parts: list[DataPhase] = []
    lengths = training.phases
    for phase in lengths:
        for mixture, first in enumerate(starts):
            begin = max(first, phase.first_step)
            ends = [*starts[mixture + 1 : mixture + 2], *([] if phase is lengths[-1] else [phase.end_step])]
            end = min(ends, default=None)
            if end is not None and end <= begin:
                continue
            before = parts[-1] if parts else None
            sample = phase.samples_before(begin)
            continues = before is not None and _stream(before) == (phase.training.seq_len, mixture)
            now = replace(
                phase,
                first_step=begin,
                end_step=max(training.steps, begin) if end is None else end,
                first_sample=sample,
                stream_start=before.phase.stream_start if before is not None and continues else sample,
                stream_end=None if end is None else phase.samples_before(end),
            )
            parts.append(DataPhase(now, mixture, None))
    stream_ends = {part.phase.stream_start: part.phase.stream_end for part in parts}
    planned = {length: _planned_end(length, data, lengths) for length in length_ends(training)}
    return [
        replace(
            part,
            phase=replace(part.phase, stream_end=stream_ends[part.phase.stream_start]),
            planned_end=planned[part.phase.training.seq_len],
        )
        for part in parts
    ]


def mixture_at(step: int, of_run: Sequence[TextMixture]) -> int:
    """Index of the mixture that `step`, counted from 0, reads; of_run: `mixtures`."""
    return max(index for index, mixture in enumerate(of_run) if mixture.first_step <= step)


def _stream(part: DataPhase) -> tuple[int, int]:
    return part.phase.training.seq_len, part.mixture


def length_ends(training: Training) -> dict[int, int]:
    """Sequence length -> step at which its last phase ends; 0 for the last length, which has no end."""
    phases = training.phases
    ends = {phase.training.seq_len: phase.end_step for phase in phases}
    return ends | {phases[-1].training.seq_len: 0}


def _planned_end(length: int, data: Data, phases: Sequence[Phase]) -> int | None:
    """Samples consumed by the end of a sequence length, as planned when the run began; None: it had no end."""
    block = [phase for phase in phases if phase.training.seq_len == length]
    step = data.order.planned_until.get(length, 0 if block[-1].schedule_entry is None else block[-1].end_step)
    if step == 0:
        return None
    return next((phase for phase in block if phase.end_step >= step), block[-1]).samples_before(step)
