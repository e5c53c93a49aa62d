"""How long one device computes on one micro-batch, part by part: a roofline for each."""

from collections import defaultdict
from dataclasses import dataclass

from megakernel.config import Attention
from megakernel.model.flops import attention_flops

from .gpus import Gpu
from .layout import Job
from .memory import FLOAT32
from .rates import Rates

MATRIX_BACKWARD = 2.0
"""Backward of a product is two products."""

SOFTMAX_BACKWARD = 2.5
"""A fused softmax multiplies queries and keys again, beside four products."""

SCAN_BACKWARD = 3.0
"""A scan runs each group again (`ops.groups`), then takes two products for each."""

PASSES = 3
"""How often a kept number is moved in forward: written, and read by what made it and by what follows."""

UPDATE = 28
"""Bytes that AdamW moves for a parameter: gradient, weight and two moments in, three out."""


@dataclass(frozen=True)
class Work:
    """Seconds by part, of one micro-batch."""

    forward: dict[str, float]
    backward: dict[str, float]


def layer(job: Job, index: int, gpu: Gpu, rates: Rates) -> Work:
    """One transformer layer."""
    attention = job.attentions[index]
    matrices = job.tokens * _matrix_flops(job, attention) / (gpu.peak_of(job.element) * rates.matrix)
    core = _core(job, attention, gpu, rates)
    whole = job.measured(index, "none")
    moved = PASSES * (whole.kept - whole.states) / (gpu.bandwidth * rates.memory)
    softmax = attention.weighs_every_pair or attention.feature_map is None
    backward = {
        "matrices": MATRIX_BACKWARD * matrices,
        "attention": (SOFTMAX_BACKWARD if softmax else SCAN_BACKWARD) * core,
        "elementwise": 2 * moved,
    }
    forward = {"matrices": matrices, "attention": core, "elementwise": moved}
    again = {"none": (), "selective": ("attention",), "full": tuple(forward)}[job.layout.recompute]
    backward["recomputed"] = sum(forward[part] for part in again)
    return Work(forward, backward)


def head(job: Job, gpu: Gpu, rates: Rates) -> Work:
    """Logits and loss; the gradients come with the loss, so backward only scales them."""
    if job.model.classifier is not None:
        return Work({}, {})
    columns = job.vocab_size / job.layout.tensor
    product = job.tokens * 2 * job.model.hidden_size * columns / (gpu.peak_of(job.element) * rates.matrix)
    logits = job.tokens * columns * (2 * job.element + 6 * FLOAT32) / (gpu.bandwidth * rates.memory)
    gradients = (job.tokens + columns) * job.model.hidden_size * 2 * job.element
    scaled = gradients / (gpu.bandwidth * rates.memory)
    return Work({"head": (1 + MATRIX_BACKWARD) * product + 2 * logits}, {"head": scaled})


def stage(job: Job, number: int, gpu: Gpu, rates: Rates) -> Work:
    """All layers of a pipeline stage."""
    parts = [(layer(job, index, gpu, rates), count) for index, count in job.layers(number)]
    if number == job.layout.pipeline - 1:
        parts.append((head(job, gpu, rates), 1))
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    for part, count in parts:
        for sums, own in ((forward, part.forward), (backward, part.backward)):
            for name, seconds in own.items():
                sums[name] += seconds * count
    return Work(forward, backward)


def update(parameters: float, gpu: Gpu, rates: Rates) -> float:
    """Seconds of the optimizer for the parameters whose state the device holds."""
    return parameters * UPDATE / (gpu.bandwidth * rates.memory)


def _matrix_flops(job: Job, attention: Attention) -> float:
    """Projections and MLP per token of one device, forward."""
    model = job.model
    vectors = 2 * model.num_heads + (attention.keys_per_head + 1) * model.kv_heads
    matrices = 3 if model.is_mlp_gated else 2
    whole = 2 * model.hidden_size * (model.head_size * vectors + model.ffn_size * matrices)
    return whole / job.layout.tensor


def _core(job: Job, attention: Attention, gpu: Gpu, rates: Rates) -> float:
    """Forward of the attention itself: its products."""
    flops = sum(attention_flops(job.model, attention, job.seq_len).values())
    is_softmax = attention.weighs_every_pair or attention.feature_map is None
    share = rates.softmax if is_softmax else rates.kernel
    return job.tokens * flops / job.layout.tensor / (gpu.peak_of(job.element) * share)
