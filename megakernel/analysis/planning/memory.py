"""Bytes that one device holds, by part, when it holds the most."""

from dataclasses import dataclass

from megakernel.config.parallel import reduce_bucket

from .gpus import Gpu
from .layout import Job

FLOAT32 = 4
INT64 = 8

PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "attention states",
    "loss",
    "exchange",
    "workspace",
)
"""The parts of a device's memory; on a GPU there is a reserve as well."""

MASTER_AND_MOMENTS = 12
"""Bytes per parameter of AdamW with float32 master weights."""

LIVE = 1_000_000_000
"""Parameters that ZeRO 3 keeps gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`)."""

RESERVE = 2.5e9
"""Assumed: context of CUDA, NCCL's buffers and kernels' code, bytes."""

FRAGMENTS = 0.05
"""Assumed: share of what torch gave out that its allocator cannot use."""


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest device of a layout."""

    parts: dict[str, float]
    """Bytes by part: weights, gradients and optimizer stay; the rest is there in backward, or at the update."""

    stage: int
    """The pipeline stage of that device."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def beyond(self, gpu: Gpu) -> float:
        """Bytes that are too many; negative where some are left."""
        return self.total - gpu.memory


def memory(job: Job) -> Memory:
    """The memory of the fullest stage."""
    return max((_stage(job, stage) for stage in job.different_stages), key=lambda one: one.total)


def persistent_bytes(job: Job, stage: int) -> dict[str, float]:
    """Bytes that lie in memory through all of a step: weights, gradients with a place of their own, optimizer."""
    zero, shards = job.layout.zero_stage, job.layout.gradient
    count = job.parameters[stage]
    weights: float = count * job.element
    if zero == 3:
        weights = weights / shards + min(count, LIVE) * job.element
    held = {0: 0.0, 1: count * FLOAT32 if job.element == 2 else 0.0, 2: 0.0, 3: count * FLOAT32 / shards}
    moments = MASTER_AND_MOMENTS * count / shards if zero else (MASTER_AND_MOMENTS - FLOAT32) * count
    return {"weights": weights, "gradients": held[zero], "optimizer": moments}


def gradient_bytes(job: Job, stage: int) -> float:
    """Bytes of gradients that backward makes and the update frees; a second micro-batch finds them there."""
    zero, count = job.layout.zero_stage, job.parameters[stage]
    if zero == 2:
        return count * FLOAT32 / job.layout.gradient
    return 0.0 if zero == 3 else count * job.element


def buckets(job: Job, count: int) -> tuple[float, float]:
    """DeepSpeed's buffers for gradients: those that are there in backward, and those at the update alone."""
    zero = job.layout.zero_stage
    zero_keys = job.config.deepspeed.get("zero_optimization", {})
    size = zero_keys.get("reduce_bucket_size", reduce_bucket(count))
    copied = min(count, size) * FLOAT32
    if zero == 0 or (zero == 1 and job.element == 2):
        return 0.0, copied
    if zero == 3:
        return size * FLOAT32, 0.0
    return size * job.element + copied, 0.0


def _stage(job: Job, stage: int) -> Memory:
    layers = [(job.measured(part), count) for part, count in job.layers(stage)]
    # One forward, one backward: an early stage has sent on as many micro-batches as there are stages behind it.
    under_way = min(job.micro_batches, job.layout.pipeline - stage)
    hidden = job.sharded_tokens * job.model.hidden_size * job.element
    training = job.config.training
    # The input of a layer that waits in host memory.
    offloaded = training.checkpoint_offload and job.on_gpu and job.layout.recompute == "full"
    moved = hidden if offloaded else 0.0
    entered = job.measured("first").kept if stage == 0 else hidden
    tables = max((one.tables for one, _ in layers), default=0.0)
    kept = entered + tables + sum((one.kept - one.states - moved) * count for one, count in layers)
    batch = 3 * INT64 * job.tokens * job.micro_batches
    forward = {
        "activations": under_way * kept + batch,
        "attention states": under_way * sum(one.states * count for one, count in layers),
    }
    in_buckets, at_update = buckets(job, job.parameters[stage])
    fixed = persistent_bytes(job, stage)
    whole = fixed["gradients"] + gradient_bytes(job, stage)
    before = whole if job.micro_batches > 1 else fixed["gradients"]
    in_layer = max((one.excess for one, _ in layers), default=0.0)
    of_one = max((one.kept for one, _ in layers), default=0.0) + entered + tables
    moments: list[dict[str, float]] = [
        # The last layer's backward, the first layer's, and the update.
        forward | {"gradients": before, "exchange": in_buckets, "workspace": in_layer},
        {
            "activations": batch + of_one,
            "gradients": whole,
            "exchange": in_buckets,
            "workspace": in_layer,
        },
        {"gradients": whole, "exchange": in_buckets + at_update, "workspace": fixed["optimizer"] / 3},
    ]
    if stage == job.layout.pipeline - 1:
        head = job.measured("last")
        loss = {"loss": head.kept + head.excess, "exchange": in_buckets}
        moments.append(forward | {"gradients": before} | loss)
    parts = dict.fromkeys(PARTS, 0.0) | fixed | max(moments, key=lambda moment: sum(moment.values()))
    if job.on_gpu:
        parts["reserve"] = RESERVE + FRAGMENTS * sum(parts.values())
    return Memory(parts, stage)
