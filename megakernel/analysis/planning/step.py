"""The time of one optimizer step: a roofline for each part of a device's work, plus exposed traffic."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megakernel.model.flops import attention_flops, matrix_flops, training_flops_per_token

from .gpus import Gpu
from .layout import Job
from .memory import FLOAT32
from .traffic import micro_batch_transfers, step_transfers, traffic
from .traffic import seconds as seconds_of

Parts = dict[str, float]
"""Seconds by part."""

MATRIX_BACKWARD = 2.0
"""Backward of a matrix product is two products."""

SOFTMAX_BACKWARD = 2.5
"""Backward of fused softmax has five products, of which one recomputes the scores, and forward two."""

SCAN_BACKWARD = 3.0
"""Backward of a scan recomputes each group (`ops.groups`), then has two products for each of forward's."""

PASSES = 3
"""Memory transfers per saved number in forward: one write, and reads by its producer and its consumer."""

UPDATE = 28
"""Bytes that AdamW moves per parameter: reads gradient, weight and two moments, writes the last three."""


@dataclass(frozen=True)
class Step:
    """Time and traffic of a step."""

    parts: Parts
    """Seconds that add up to the step: work of the slowest stage, its exposed traffic, the pipeline's bubble."""

    sent: dict[str, float]
    """Bytes that leave one device of that stage in a step, by group."""

    hidden: float
    """Seconds of traffic that overlaps with other work."""

    mfu: float
    """The model's FLOPs without recomputation over those that the devices could have done in that time."""

    tokens: int
    """Tokens of a step."""

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.seconds


def step(job: Job, gpu: Gpu, necessary: float | None = None) -> Step:
    """Predict one step. necessary: `necessary_flops` if already computed; it is the same for all layouts."""
    flops = necessary_flops(job) if necessary is None else necessary
    return max(
        (_of_stage(job, stage, gpu, flops) for stage in job.distinct_stages), key=lambda step: step.seconds
    )


def necessary_flops(job: Job) -> float:
    """FLOPs of one step without recomputation: the numerator of MFU."""
    sizes = (job.seq_len, job.vocab_size, job.config.predicted_share)
    return job.tokens_per_step * training_flops_per_token(job.model, *sizes)


def _of_stage(job: Job, stage: int, gpu: Gpu, necessary: float) -> Step:
    layout = job.layout
    forward, backward = _work(job, stage, gpu)
    exposed, hidden = _traffic(job, stage, forward, backward, gpu)
    micro_batch = _sum((forward, 1), (backward, 1), (exposed, 1))
    bubble = {"bubble": sum(micro_batch.values())} if layout.pipeline > 1 else {}
    at_end = ({f"{x.group} traffic": seconds_of(x, layout, gpu)} for x in step_transfers(job, stage))
    parts = _sum((micro_batch, job.micro_batches), (bubble, layout.pipeline - 1), *((x, 1) for x in at_end))
    updated = job.trained[stage] / (layout.gradient if layout.zero_stage else 1)
    parts["optimizer"] = gpu.transfer_seconds(updated * UPDATE)
    sent = _sum(*(({str(x.group): x.sent}, 1) for x in traffic(job, stage)))
    mfu = necessary / (sum(parts.values()) * gpu.peak_of(job.element) * layout.devices)
    return Step(parts, sent, hidden * job.micro_batches, mfu, job.tokens_per_step)


def _sum(*pairs: tuple[Mapping[str, float], float]) -> Parts:
    """The sum of all mappings by part, each multiplied by its factor."""
    sums: Parts = defaultdict(float)
    for parts, times in pairs:
        for name, value in parts.items():
            sums[name] += value * times
    return dict(sums)


def _traffic(job: Job, stage: int, forward: Parts, backward: Parts, gpu: Gpu) -> tuple[Parts, float]:
    """Exposed seconds of a micro-batch's traffic by group, and the seconds that its work hides."""
    exposed: Parts = defaultdict(float)
    overlapping: dict[bool, float] = defaultdict(float)
    for transfer in micro_batch_transfers(job, stage):
        seconds = seconds_of(transfer, job.layout, gpu)
        if transfer.is_hidden:
            overlapping[transfer.backward] += seconds
        else:
            exposed[f"{transfer.group} traffic"] += seconds
    hidden = 0.0
    for goes_back, seconds in overlapping.items():
        available = (backward if goes_back else forward).get("attention", 0.0)
        if goes_back and job.layout.recompute != "none":  # forward is recomputed there, with its exchange
            available += forward.get("attention", 0.0)
        hidden += min(seconds, available)
        exposed["cp traffic"] += max(0.0, seconds - available)
    return exposed, hidden


def _work(job: Job, stage: int, gpu: Gpu) -> tuple[Parts, Parts]:
    """Seconds of forward and of backward of one micro-batch on a pipeline stage."""
    parts = [(_layer(job, index, gpu), count) for index, count in job.layers(stage)]
    if stage == job.layout.pipeline - 1 and job.model.classifier is None:
        parts.append((_head(job, gpu), 1))
    forward, backward = (_sum(*((ways[way], count) for ways, count in parts)) for way in (0, 1))
    return forward, backward


def _layer(job: Job, index: int, gpu: Gpu) -> tuple[Parts, Parts]:
    attention = job.model.layer_attention(index)
    costs = job.costs(index, "none")
    is_state_alone = attention.feature_map is not None or attention.spec.exchanges == ("state",)
    softmax = attention.weighs_every_pair or not is_state_alone
    products = sum(attention_flops(job.model, attention, job.seq_len).values()) / job.layout.tensor
    matrices = sum(matrix_flops(job.model, attention).values()) / job.layout.tensor
    forward = {
        "matrices": job.tokens * matrices / gpu.flops("matrix", job.element),
        "attention": job.tokens * products / gpu.flops("softmax" if softmax else "kernel", job.element),
        "elementwise": gpu.transfer_seconds(PASSES * (costs.saved - costs.states)),
    }
    recomputed = {"none": (), "selective": ("attention",), "full": tuple(forward)}[job.layout.recompute]
    backward = {
        "matrices": MATRIX_BACKWARD * forward["matrices"],
        "attention": (SOFTMAX_BACKWARD if softmax else SCAN_BACKWARD) * forward["attention"],
        "elementwise": 2 * forward["elementwise"],
        "recomputed": sum(forward[part] for part in recomputed),
    }
    return forward, backward


def _head(job: Job, gpu: Gpu) -> tuple[Parts, Parts]:
    """Logits and loss; forward computes the gradients too, so backward only scales them."""
    columns = job.vocab_size / job.layout.tensor
    product = job.tokens * 2 * job.model.hidden_size * columns / gpu.flops("matrix", job.element)
    logits = gpu.transfer_seconds(job.tokens * columns * (2 * job.element + 6 * FLOAT32))
    scaled = gpu.transfer_seconds((job.tokens + columns) * job.model.hidden_size * 2 * job.element)
    return {"head": (1 + MATRIX_BACKWARD) * product + 2 * logits}, {"head": scaled}
