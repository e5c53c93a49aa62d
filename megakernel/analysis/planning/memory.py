"""Peak memory of one device, by part."""

from dataclasses import dataclass
from typing import Literal

from megakernel.config.parallel import overlaps_reduction, reduce_bucket

from .gpus import Gpu
from .layout import PlannedJob

FLOAT32 = 4
INT64 = 8

PARTS = ("weights", "gradients", "optimizer", "activations", "loss", "exchange", "workspace")
"""The parts of a device's memory; on a GPU there is also a `reserve`, and beside a teacher its weights."""

MASTER_AND_MOMENTS = 12
"""Bytes per parameter of AdamW with float32 master weights; Muon has one moment less."""

MUON_TENSORS = 6
"""Float32 matrices of the size of the one that Muon orthogonalizes, at most: its direction and products."""

ZERO3_LIVE = 1_000_000_000
"""Parameters that ZeRO 3 keeps gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`)."""

RESERVE = 2.5e9
"""Assumed bytes of CUDA's context, NCCL's buffers and kernels' code."""

FRAGMENTATION = 0.05
"""Assumed fragmentation: share of the allocated bytes that torch's allocator cannot use."""


@dataclass(frozen=True)
class Memory:
    """Memory of the fullest device of a layout."""

    parts: dict[str, float]
    """Bytes by part at the moment of the peak, which is at the start, in backward, in the loss or at the update."""

    stage: int
    """The pipeline stage of that device."""

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def beyond(self, gpu: Gpu) -> float:
        """Bytes in excess of the GPU's memory; negative if some are free."""
        return self.total - gpu.memory


def memory(job: PlannedJob) -> Memory:
    """The memory of the fullest stage."""
    return max((_stage_memory(job, stage) for stage in job.distinct_stages), key=lambda memory: memory.total)


def persistent_bytes(job: PlannedJob, stage: int) -> dict[str, float]:
    """Bytes that are allocated during the whole step: weights, persistent gradient buffers, optimizer, a teacher."""
    zero, shards = job.layout.zero_stage, job.layout.gradient
    count, trained = job.parameters[stage], job.trained[stage]
    weights: float = count * job.element
    if zero == 3:
        weights = kept_weights(job, stage) + min(count, ZERO3_LIVE) * job.element
    held = {1: trained * FLOAT32 if sums_in_float32(job) else 0.0, 3: trained * FLOAT32 / shards}
    moments = float((MASTER_AND_MOMENTS if zero else MASTER_AND_MOMENTS - FLOAT32) * trained)
    moments -= FLOAT32 * sum(job.matrices(stage))
    moments /= shards if zero else 1
    parts = {"weights": weights, "gradients": held.get(zero, 0.0), "optimizer": moments}
    if is_offloaded(job, "optimizer"):
        parts |= {"gradients": 0.0, "optimizer": 0.0}
    if job.config.objective.kind != "labels":
        # At most: it is as large as the model, and shares the weights that are frozen there.
        parts["teacher"] = count * job.element
    return parts


def kept_weights(job: PlannedJob, stage: int) -> float:
    """Bytes of weights that a device keeps between the layers' runs: with ZeRO 3 its shards, unless offloaded."""
    weights = float(job.parameters[stage] * job.element)
    if job.layout.zero_stage < 3:
        return weights
    return 0.0 if is_offloaded(job, "param") else weights / job.layout.gradient


def start_bytes(job: PlannedJob, stage: int) -> dict[str, float]:
    """Bytes by part while the model is built, before gradients and optimizer exist.

    Layers are built one after the other (`megakernel/model/start.py`); ZeRO 3 shards each once it is whole.
    """
    whole = job.largest_layer(stage) * job.element if job.layout.zero_stage == 3 else 0.0
    return {"weights": kept_weights(job, stage), "gradients": 0.0, "optimizer": 0.0, "workspace": whole}


def gradient_bytes(job: PlannedJob, stage: int) -> float:
    """Bytes of gradients that backward allocates and the update frees; they are live in later micro-batches."""
    zero, count = job.layout.zero_stage, job.trained[stage]
    if zero == 2:
        return 0.0 if is_offloaded(job, "optimizer") else count * FLOAT32 / job.layout.gradient
    # DeepSpeed's BF16_Optimizer adds each gradient to its float32 sums as soon as it is complete.
    return 0.0 if zero == 3 or sums_in_float32(job) else count * job.element


def sums_in_float32(job: PlannedJob) -> bool:
    """Whether DeepSpeed's BF16_Optimizer trains: ZeRO 1 in bfloat16 without offload."""
    return job.layout.zero_stage == 1 and job.element == 2 and not is_offloaded(job, "optimizer")


def is_offloaded(job: PlannedJob, what: Literal["optimizer", "param"]) -> bool:
    """Whether DeepSpeed keeps AdamW's state and the sharded gradients, or the sharded weights, off the device."""
    keys = job.config.deepspeed.get("zero_optimization", {}).get(f"offload_{what}") or {}
    device, zero = keys.get("device"), job.layout.zero_stage
    return (zero == 3 and device == "nvme") or (device == "cpu" and zero >= (1 if what == "optimizer" else 3))


def bucket_bytes(job: PlannedJob, count: int) -> tuple[float, float]:
    """Bytes of DeepSpeed's buckets for `count` gradients: from backward on, and those that exist only at the update."""
    zero = job.layout.zero_stage
    zero_keys = job.config.deepspeed.get("zero_optimization", {})
    size = zero_keys.get("reduce_bucket_size", reduce_bucket(count, job.layout.gradient))
    overlaps = zero_keys.get("overlap_comm", overlaps_reduction(zero, job.layout.pipeline))
    copied = min(count, size) * FLOAT32
    if sums_in_float32(job):
        return 0.0, 0.0
    if zero == 0:
        return 0.0, copied
    if zero == 3:
        return size * FLOAT32, 0.0
    return (2 if overlaps else 1) * size * job.element + copied, 0.0


def muon_bytes(job: PlannedJob, stage: int) -> float:
    """Bytes of Muon's update: the directions and updates of what a rank updates, and of the largest whole matrix."""
    sizes = job.matrices(stage)
    flat = 2 * FLOAT32 * sum(sizes) / job.layout.gradient if job.layout.zero_stage else 0.0
    return flat + MUON_TENSORS * FLOAT32 * job.layout.tensor * max(sizes, default=0)


def _stage_memory(job: PlannedJob, stage: int) -> Memory:
    layers = [(job.costs(part), count) for part, count in job.layers(stage)]
    # 1F1B: a stage has as many micro-batches in flight as there are stages from it to the last.
    in_flight = min(job.micro_batches, job.layout.pipeline - stage)
    hidden = job.sharded_tokens * job.model.hidden_size * job.element
    training = job.config.training
    # Inputs of recomputed layers that are offloaded to host memory.
    offloaded = training.checkpoint_offload and job.on_gpu and job.layout.recompute == "full"
    on_host = hidden if offloaded else 0.0
    stage_input = job.costs("first").saved if stage == 0 else hidden
    tables = max((part.tables for part, _ in layers), default=0.0)
    kept = stage_input + tables + sum((part.saved - on_host) * count for part, count in layers)
    # Token ids, positions, labels, and numbers for dropout.
    batch = (4 if job.model.dropout.any else 3) * INT64 * job.tokens * job.micro_batches
    forward = {"activations": in_flight * kept + batch}
    in_buckets, at_update = bucket_bytes(job, job.trained[stage])
    fixed = persistent_bytes(job, stage)
    all_gradients = fixed["gradients"] + gradient_bytes(job, stage)
    before = all_gradients if job.micro_batches > 1 else fixed["gradients"]
    layer_excess = max((part.excess for part, _ in layers), default=0.0)
    one_layer = max((part.saved for part, _ in layers), default=0.0) + stage_input + tables
    update = max(fixed["optimizer"] / 3, muon_bytes(job, stage))
    peaks: list[dict[str, float]] = [
        start_bytes(job, stage),
        # The last layer's backward, the first layer's, and the update.
        forward | {"gradients": before, "exchange": in_buckets, "workspace": layer_excess},
        {"activations": batch + one_layer, "gradients": all_gradients}
        | {"exchange": in_buckets, "workspace": layer_excess},
        {"gradients": all_gradients, "exchange": in_buckets + at_update, "workspace": update},
    ]
    if stage == job.layout.pipeline - 1:
        head = job.costs("last")
        loss = {"loss": head.saved + head.excess, "exchange": in_buckets}
        peaks.append(forward | {"gradients": before} | loss)
    moments = [dict.fromkeys(PARTS, 0.0) | fixed | moment for moment in peaks]
    parts = max(moments, key=lambda moment: sum(moment.values()))
    if job.on_gpu:
        parts["reserve"] = RESERVE + FRAGMENTATION * sum(parts.values())
    return Memory(parts, stage)
