"""The time of one optimizer step, and what share of the devices' peak it makes use of."""

from collections import defaultdict
from dataclasses import dataclass

from megakernel.config import Masking
from megakernel.model.flops import training_flops_per_token

from . import work
from .gpus import Gpu
from .layout import Job
from .rates import Rates
from .traffic import of_micro_batch, of_step, traffic
from .traffic import seconds as seconds_of


@dataclass(frozen=True)
class Step:
    """What a step takes."""

    parts: dict[str, float]
    """Seconds that add up: work of the slowest stage, what of its traffic nothing hides, the pipeline's bubble."""

    sent: dict[str, float]
    """Bytes that leave one device of that stage in a step, by group."""

    hidden: float
    """Seconds of traffic behind other work."""

    mfu: float
    """Necessary operations of the model over what the devices could have done in that time."""

    tokens: int
    """Tokens of a step."""

    @property
    def seconds(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.seconds


def step(job: Job, gpu: Gpu, rates: Rates, necessary: float | None = None) -> Step:
    """Predict one step. necessary: `necessary_flops`, which no layout changes, where it is known already."""
    flops = necessary_flops(job) if necessary is None else necessary
    stages = (_of_stage(job, stage, gpu, rates, flops) for stage in job.different_stages)
    return max(stages, key=lambda one: one.seconds)


def _of_stage(job: Job, stage: int, gpu: Gpu, rates: Rates, necessary: float) -> Step:
    layout = job.layout
    done = work.stage(job, stage, gpu, rates)
    exposed, hidden = _exposed(job, stage, done, gpu, rates)
    once: dict[str, float] = defaultdict(float)
    for part, seconds in (*done.forward.items(), *done.backward.items(), *exposed.items()):
        once[part] += seconds
    parts = {name: seconds * job.micro_batches for name, seconds in once.items()}
    if layout.pipeline > 1:
        parts["bubble"] = sum(once.values()) * (layout.pipeline - 1)
    for transfer in of_step(job, stage):
        name = f"{transfer.group} traffic"
        parts[name] = parts.get(name, 0.0) + seconds_of(transfer, layout, gpu, rates)
    parts["optimizer"] = work.update(
        job.parameters[stage] / (layout.gradient if layout.zero_stage else 1), gpu, rates
    )
    sent: dict[str, float] = defaultdict(float)
    for transfer in traffic(job, stage):
        sent[transfer.group] += transfer.sent
    return Step(
        parts,
        dict(sent),
        hidden * job.micro_batches,
        necessary / (sum(parts.values()) * gpu.peak_of(job.element) * layout.devices),
        job.tokens_per_step,
    )


def _exposed(job: Job, stage: int, done: work.Work, gpu: Gpu, rates: Rates) -> tuple[dict[str, float], float]:
    """Seconds of a micro-batch's traffic that nothing hides, by group, and those that work hides."""
    exposed: dict[str, float] = defaultdict(float)
    waiting: dict[bool, float] = defaultdict(float)
    for transfer in of_micro_batch(job, stage):
        seconds = seconds_of(transfer, job.layout, gpu, rates)
        if transfer.behind is None:
            exposed[f"{transfer.group} traffic"] += seconds
        else:
            waiting[transfer.backward] += seconds
    hidden = 0.0
    for backward, seconds in waiting.items():
        room = (done.backward if backward else done.forward).get("attention", 0.0)
        if backward and job.layout.recompute != "none":  # forward runs again there, and so does its exchange
            room += done.forward.get("attention", 0.0)
        hidden += min(seconds, room)
        exposed["cp traffic"] += max(0.0, seconds - room)
    return dict(exposed), hidden


def necessary_flops(job: Job) -> float:
    """The numerator of MFU."""
    masking = job.config.data.masking or Masking()
    predicted = masking.rate if job.model.kind == "masked_lm" else 1.0
    return job.tokens_per_step * training_flops_per_token(job.model, job.seq_len, job.vocab_size, predicted)
