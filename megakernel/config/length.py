"""Rows that grow while a run trains: the schedule as it is written, and the phases that it means."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import Field

from .model import Model
from .rope import RopeScaling
from .section import Section

if TYPE_CHECKING:
    from .training import Training


class LengthPhase(Section):
    """A phase before the last. What it does not say is as in the last, which training and model describe."""

    until_step: int = Field(gt=0)
    """Steps of the whole run after which the next phase begins."""

    seq_len: int = Field(gt=0, le=1_000_000_000)
    """Tokens per sample; at most that of the next phase."""

    global_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per optimizer step; None takes training.global_batch_size."""

    micro_batch_size: int | None = Field(default=None, gt=0, le=10_000_000)
    """Samples per forward pass of one data-parallel rank; None takes training.micro_batch_size."""

    rope_base: float | None = Field(default=None, gt=1)
    """Base of the rotary frequencies; None takes model.rope_base."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; None takes model.rope_scaling, {kind: none} has none."""


@dataclass(frozen=True)
class Phase:
    """Steps [first_step, end_step) of a run, which read rows of one length."""

    key: str
    """Where it is written: `training`, or `training.seq_len_schedule.0`."""

    first_step: int
    end_step: int

    first_sample: int
    """Samples that the run consumes before it."""

    stream_start: int
    """Samples that the run consumes before its first phase of this length: those read another stream."""

    stream_end: int | None
    """Samples that it consumes up to its last phase of this length; None for the last length, which has no end."""

    training: "Training"
    """The training section while the phase lasts; it has no schedule."""

    written: LengthPhase | None
    """What the schedule says of it; None for the last phase."""

    def model(self, model: Model) -> Model:
        """The model with the rotary frequencies of this phase."""
        own = {"rope_base": None, "rope_scaling": None} if self.written is None else dict(self.written)
        changes = {key: own[key] for key in ("rope_base", "rope_scaling") if own[key] is not None}
        return model.model_copy(update=changes)

    def samples_before(self, step: int) -> int:
        """Samples that the run has consumed when `step` of this phase begins."""
        return self.first_sample + (step - self.first_step) * self.training.global_batch_size


def phases_of(training: "Training") -> list[Phase]:
    """The phases in order; the last lasts as long as training does, however many steps that are."""
    phases: list[Phase] = []
    written: Sequence[LengthPhase | None] = [*training.seq_len_schedule, None]
    for index, entry in enumerate(written):
        before = phases[-1] if phases else None
        changes = {} if entry is None else entry.model_dump(exclude_none=True, include=_OF_TRAINING)
        now = training.model_copy(update={**changes, "seq_len_schedule": []})
        first = 0 if before is None else before.end_step
        consumed = 0 if before is None else before.samples_before(first)
        continues = before is not None and before.training.seq_len == now.seq_len
        phases.append(
            Phase(
                key="training" if entry is None else f"training.seq_len_schedule.{index}",
                first_step=first,
                end_step=max(training.steps, first) if entry is None else entry.until_step,
                first_sample=consumed,
                stream_start=before.stream_start if before is not None and continues else consumed,
                stream_end=None,
                training=now,
                written=entry,
            )
        )
    ends: dict[int, int | None] = {
        phase.stream_start: phase.samples_before(phase.end_step) for phase in phases
    }
    ends[phases[-1].stream_start] = None
    return [replace(phase, stream_end=ends[phase.stream_start]) for phase in phases]


_OF_TRAINING = {"seq_len", "global_batch_size", "micro_batch_size"}
