"""Bytes that one device holds, by part, when it holds the most."""

from dataclasses import dataclass

from megakernel.config import Attention
from megakernel.model import parameters

from . import activations
from .activations import SavedActivations
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
"""What memory is told apart by; on a GPU there is a reserve as well."""

MASTER_AND_MOMENTS = 12
"""Bytes per parameter of AdamW with float32 master weights."""

BUCKET = 500_000_000
"""Numbers that DeepSpeed reduces at once (`reduce_bucket_size`), where the configuration names no others."""

LIVE = 1_000_000_000
"""Parameters that ZeRO 3 keeps gathered (`stage3_max_live_parameters`, `stage3_max_reuse_distance`)."""

RESERVE = 2.5e9
"""Assumed: context of CUDA, NCCL's buffers and kernels' code, bytes."""

FRAGMENTS = 0.05
"""Assumed: share of what torch gave out that its allocator cannot use."""


@dataclass(frozen=True)
class Memory:
    """What the fullest device of a layout holds."""

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


def stays(job: Job, stage: int) -> dict[str, float]:
    """Bytes that lie in memory through all of a step: weights, gradients with a place of their own, optimizer."""
    zero, shards = job.layout.zero_stage, job.layout.gradient
    count = job.parameters[stage]
    weights: float = count * job.element
    if zero == 3:
        weights = weights / shards + min(count, LIVE) * job.element
    held = {0: 0.0, 1: count * FLOAT32 if job.element == 2 else 0.0, 2: 0.0, 3: count * FLOAT32 / shards}
    moments = MASTER_AND_MOMENTS * count / shards if zero else (MASTER_AND_MOMENTS - FLOAT32) * count
    return {"weights": weights, "gradients": held[zero], "optimizer": moments}


def comes(job: Job, stage: int) -> float:
    """Bytes of gradients that backward makes and the update frees; a second micro-batch finds them there."""
    zero, count = job.layout.zero_stage, job.parameters[stage]
    if zero == 2:
        return count * FLOAT32 / job.layout.gradient
    return 0.0 if zero == 3 else count * job.element


def buckets(job: Job, count: int) -> tuple[float, float]:
    """DeepSpeed's buffers for gradients: those that are there in backward, and those at the update alone."""
    zero = job.layout.zero_stage
    size = job.config.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size", BUCKET)
    copied = min(count, size) * FLOAT32
    if zero == 0 or (zero == 1 and job.element == 2):
        return 0.0, copied
    if zero == 3:
        return size * FLOAT32, 0.0
    return size * job.element + copied, 0.0


def _stage(job: Job, stage: int) -> Memory:
    layers = job.layers(stage)
    # One forward, one backward: an early stage has sent on as many micro-batches as there are stages behind it.
    under_way = min(job.micro_batches, job.layout.pipeline - stage)
    kept = SavedActivations(0.0)
    for attention, count in layers:
        one = activations.layer(job, attention)
        kept = kept.plus(SavedActivations(one.tokens * count, one.states * count))
    last = stage == job.layout.pipeline - 1
    in_buckets, at_update = buckets(job, job.parameters[stage])
    fixed = stays(job, stage)
    hidden = job.sharded_tokens * job.model.hidden_size * job.element
    batch = 3 * INT64 * job.tokens * job.micro_batches
    forward = {
        "activations": under_way * (kept.tokens + hidden) + batch,
        "attention states": under_way * kept.states,
    }
    exchange = max((exchange_buffer(job, one) for one, _ in layers), default=0.0)
    in_layer = max((_workspace(job, one) for one, _ in layers), default=0.0)
    whole = fixed["gradients"] + comes(job, stage)
    before = whole if job.micro_batches > 1 else fixed["gradients"]
    moments: list[dict[str, float]] = [
        # The last layer's backward, the first layer's, and the update.
        forward | {"gradients": before, "exchange": in_buckets + exchange, "workspace": in_layer},
        {"activations": batch, "gradients": whole, "exchange": in_buckets + exchange, "workspace": in_layer},
        {"gradients": whole, "exchange": in_buckets + at_update, "workspace": fixed["optimizer"] / 3},
    ]
    if last:
        loss = {"loss": activations.norm(job) + _loss(job), "exchange": in_buckets}
        moments.append(forward | {"gradients": before} | loss)
    parts = dict.fromkeys(PARTS, 0.0) | fixed | max(moments, key=lambda moment: sum(moment.values()))
    if job.stack.on_gpu:
        parts["reserve"] = RESERVE + FRAGMENTS * sum(parts.values())
    return Memory(parts, stage)


def _loss(job: Job) -> float:
    """Logits of one chunk, as the product gives them and in float32, and what hidden states and head have as gradients.

    The head's is a sum in float32 where there are several chunks.
    """
    if job.model.classifier is not None:
        return 0.0
    chunk = min(job.config.training.loss_chunk_size, job.tokens)
    rows = parameters.embedding_rows(job.model, job.vocab_size) / job.layout.tensor
    logits = chunk * rows * (job.element + FLOAT32)
    head = rows * job.model.hidden_size * (job.element if chunk == job.tokens else job.element + FLOAT32)
    hidden = job.tokens * job.model.hidden_size * job.element
    return logits + head + hidden * (2 if job.layout.sequence_parallel else 1)


def exchange_buffer(job: Job, attention: Attention) -> float:
    """What a layer's exchange over the context ranks holds at once."""
    ranks = job.layout.context
    if ranks == 1:
        return 0.0
    width = job.model.head_size * job.element
    if attention.trades_heads(job.model.is_causal):
        if job.passes_keys_round(attention):
            # The pair that is read and the one that arrives, and as much for their gradients.
            return 4 * 2 * job.tokens * job.kv_heads * width
        return 2 * job.tokens * max(job.heads, job.kv_heads) * width
    state = activations.state(job, attention)
    # Of all shards, or what enters this one and what leaves it.
    at_once = ranks if job.state_parts(state) is None else 2
    return at_once * state + 2 * activations.tail(job, attention)


def _workspace(job: Job, attention: Attention) -> float:
    """What backward of one layer needs for a moment: the layer where it runs again, and the gradients inside it."""
    kept, whole = activations.layer(job, attention), activations.whole_layer(job, attention)
    again = whole.total - kept.total if job.layout.recompute != "none" else 0.0
    hidden = job.sharded_tokens * job.model.hidden_size * job.element
    in_mlp = job.tokens * 2 * job.model.ffn_size / job.layout.tensor * job.element + hidden
    # When backward comes to the attention, what the MLP kept is gone.
    vectors = 2 * job.heads + (attention.keys_per_head + 1) * job.kv_heads
    gradients = job.tokens * vectors * job.model.head_size * job.element + hidden
    group = job.rows * min(activations.GROUP, job.cp_shard) * activations.scanned(job, attention)
    in_core = gradients + group - activations.mlp(job) - activations.norm(job)
    if job.layout.recompute == "selective":  # backward comes to the attention behind the MLP
        return max(in_mlp, again + in_core)
    return again + max(in_mlp, in_core)
