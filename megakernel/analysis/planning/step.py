"""The time of one optimizer step: a roofline for each part of a device's work, and what traffic adds to it."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megakernel.model.flops import attention_flops, matrix_flops, training_flops_per_token

from .gpus import Gpu
from .layout import Job
from .memory import FLOAT32
from .traffic import of_micro_batch, of_step, traffic
from .traffic import seconds as seconds_of

Parts = dict[str, float]
"""Seconds by part."""

MATRIX_BACKWARD = 2.0
"""Backward of a product is two products."""

SOFTMAX_BACKWARD = 2.5
"""A fused softmax multiplies queries and keys again, beside four products."""

SCAN_BACKWARD = 3.0
"""A scan runs each group again (`ops.groups`), then takes two products for each."""

PASSES = 3
"""Transfers of a saved number in forward: written, and read by its producer and by its consumer."""

UPDATE = 28
"""Bytes that AdamW moves for a parameter: gradient, weight and two moments in, three out."""


@dataclass(frozen=True)
class Step:
    """Time and traffic of a step."""

    parts: Parts
    """They add up: work of the slowest stage, what of its traffic nothing hides, the pipeline's bubble."""

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


def step(job: Job, gpu: Gpu, necessary: float | None = None) -> Step:
    """Predict one step. necessary: `necessary_flops`, which no layout changes, where it is known already."""
    flops = necessary_flops(job) if necessary is None else necessary
    return max(
        (_of_stage(job, stage, gpu, flops) for stage in job.different_stages), key=lambda one: one.seconds
    )


def necessary_flops(job: Job) -> float:
    """The numerator of MFU."""
    sizes = (job.seq_len, job.vocab_size, job.config.predicted_share)
    return job.tokens_per_step * training_flops_per_token(job.model, *sizes)


def _of_stage(job: Job, stage: int, gpu: Gpu, necessary: float) -> Step:
    layout = job.layout
    forward, backward = _work(job, stage, gpu)
    exposed, hidden = _traffic(job, stage, forward, backward, gpu)
    once = _sum((forward, 1), (backward, 1), (exposed, 1))
    bubble = {"bubble": sum(once.values())} if layout.pipeline > 1 else {}
    at_end = ({f"{one.group} traffic": seconds_of(one, layout, gpu)} for one in of_step(job, stage))
    parts = _sum((once, job.micro_batches), (bubble, layout.pipeline - 1), *((one, 1) for one in at_end))
    own = job.parameters[stage] / (layout.gradient if layout.zero_stage else 1)
    parts["optimizer"] = gpu.moving(own * UPDATE)
    sent = _sum(*(({str(one.group): one.sent}, 1) for one in traffic(job, stage)))
    mfu = necessary / (sum(parts.values()) * gpu.peak_of(job.element) * layout.devices)
    return Step(parts, sent, hidden * job.micro_batches, mfu, job.tokens_per_step)


def _sum(*pairs: tuple[Mapping[str, float], float]) -> Parts:
    """By part, each mapping as often as stands beside it."""
    sums: Parts = defaultdict(float)
    for parts, times in pairs:
        for name, value in parts.items():
            sums[name] += value * times
    return dict(sums)


def _traffic(job: Job, stage: int, forward: Parts, backward: Parts, gpu: Gpu) -> tuple[Parts, float]:
    """Seconds of a micro-batch's traffic that nothing hides, by group, and those that its work hides."""
    exposed: Parts = defaultdict(float)
    waiting: dict[bool, float] = defaultdict(float)
    for transfer in of_micro_batch(job, stage):
        seconds = seconds_of(transfer, job.layout, gpu)
        if transfer.is_hidden:
            waiting[transfer.backward] += seconds
        else:
            exposed[f"{transfer.group} traffic"] += seconds
    hidden = 0.0
    for goes_back, seconds in waiting.items():
        room = (backward if goes_back else forward).get("attention", 0.0)
        if goes_back and job.layout.recompute != "none":  # forward runs again there, and so does its exchange
            room += forward.get("attention", 0.0)
        hidden += min(seconds, room)
        exposed["cp traffic"] += max(0.0, seconds - room)
    return exposed, hidden


def _work(job: Job, stage: int, gpu: Gpu) -> tuple[Parts, Parts]:
    """Forward and backward of one micro-batch on a pipeline stage."""
    parts = [(_layer(job, index, gpu), count) for index, count in job.layers(stage)]
    if stage == job.layout.pipeline - 1 and job.model.classifier is None:
        parts.append((_head(job, gpu), 1))
    forward, backward = (_sum(*((ways[way], count) for ways, count in parts)) for way in (0, 1))
    return forward, backward


def _layer(job: Job, index: int, gpu: Gpu) -> tuple[Parts, Parts]:
    attention = job.model.layer_attention(index)
    whole = job.measured(index, "none")
    is_state_alone = attention.feature_map is not None or attention.spec.exchanges == ("state",)
    softmax = attention.weighs_every_pair or not is_state_alone
    products = sum(attention_flops(job.model, attention, job.seq_len).values()) / job.layout.tensor
    matrices = sum(matrix_flops(job.model, attention).values()) / job.layout.tensor
    forward = {
        "matrices": job.tokens * matrices / gpu.flops("matrix", job.element),
        "attention": job.tokens * products / gpu.flops("softmax" if softmax else "kernel", job.element),
        "elementwise": gpu.moving(PASSES * (whole.kept - whole.states)),
    }
    again = {"none": (), "selective": ("attention",), "full": tuple(forward)}[job.layout.recompute]
    backward = {
        "matrices": MATRIX_BACKWARD * forward["matrices"],
        "attention": (SOFTMAX_BACKWARD if softmax else SCAN_BACKWARD) * forward["attention"],
        "elementwise": 2 * forward["elementwise"],
        "recomputed": sum(forward[part] for part in again),
    }
    return forward, backward


def _head(job: Job, gpu: Gpu) -> tuple[Parts, Parts]:
    """Logits and loss; the gradients come with the loss, so backward only scales them."""
    columns = job.vocab_size / job.layout.tensor
    product = job.tokens * 2 * job.model.hidden_size * columns / gpu.flops("matrix", job.element)
    logits = gpu.moving(job.tokens * columns * (2 * job.element + 6 * FLOAT32))
    scaled = gpu.moving((job.tokens + columns) * job.model.hidden_size * 2 * job.element)
    return {"head": (1 + MATRIX_BACKWARD) * product + 2 * logits}, {"head": scaled}
