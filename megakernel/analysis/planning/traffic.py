"""What one device hands to collectives in a step, counted message by message.

`tests/distributed/test_planned_traffic.py` holds these counts against what real processes send, to the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megakernel.config import Attention
from megakernel.model import parameters

from . import activations
from .layout import Job
from .memory import LIVE
from .stages import holds_second_embedding

FLOAT32 = 4
INT64 = 8

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "chain"]
"""As torch.distributed names them; `chain`: from each rank to the next one, which waits for it."""

Group = Literal["tp", "cp", "gradient", "pp"]


@dataclass(frozen=True)
class Transfer:
    """Equal messages of one device over one group."""

    group: Group
    """Over whom: tp, cp, gradient (data x context) or pp."""

    operation: Operation

    bytes: float
    """What the device hands in, all messages together."""

    calls: float
    """Messages."""

    ranks: int
    """Devices of the group."""

    behind: Literal["attention"] | None = None
    """Which work of the device runs at the same time."""

    backward: bool = False
    """Whether it happens in backward."""

    parts: int = 1
    """In which a message of a chain follows itself."""

    @property
    def sent(self) -> float:
        """Bytes that leave the device: of a ring's steps, of an all-to-all what is for others."""
        others = self.ranks - 1
        factors = {
            "all_reduce": 2 * others / self.ranks,
            "all_gather": others,
            "reduce_scatter": others / self.ranks,
            "all_to_all": others / self.ranks,
            "send": 1,
            "chain": 1,
        }
        return self.bytes * factors[self.operation]

    def times(self, count: float) -> "Transfer":
        """As many such transfers."""
        if count == 1:
            return self
        return replace(self, bytes=self.bytes * count, calls=self.calls * count)


def traffic(job: Job, stage: int) -> list[Transfer]:
    """All transfers of one step of a device of a pipeline stage that has neighbours on both sides where any has."""
    per_micro_batch = [*of_micro_batch(job, stage)]
    return [one.times(job.micro_batches) for one in per_micro_batch] + [*of_step(job, stage)]


def of_micro_batch(job: Job, stage: int) -> Iterator[Transfer]:
    """What a forward and a backward of one micro-batch send."""
    layout = job.layout
    layers = job.layers(stage)
    if layout.tensor > 1:
        yield from _over_tensor(job, stage, layers)
    if layout.context > 1:
        for attention, count in layers:
            yield from (one.times(count) for one in over_context(job, attention))
    if layout.pipeline > 1:
        hidden = job.sharded_tokens * job.model.hidden_size * job.element
        labels = job.tokens * 2 * INT64 + INT64  # positions, labels and how many of them count
        if stage < layout.pipeline - 1:
            yield Transfer("pp", "send", hidden + labels, 4, layout.pipeline)
        if stage > 0:
            yield Transfer("pp", "send", hidden, 1, layout.pipeline, backward=True)


def _over_tensor(job: Job, stage: int, layers: list[tuple[Attention, int]]) -> Iterator[Transfer]:
    """Megatron-core's parallel layers, the vocabulary's cross entropy, and gradients of what all ranks hold whole."""
    layout, count = job.layout, len(job.stages[stage])
    ranks = layout.tensor
    hidden = job.tokens * job.model.hidden_size * job.element
    first, last = stage == 0, stage == layout.pipeline - 1
    again = count if layout.recompute == "full" else 0
    if not layout.sequence_parallel:
        yield Transfer("tp", "all_reduce", hidden, 1, ranks).times(2 * count + first + again)
        yield Transfer("tp", "all_reduce", hidden, 1, ranks, backward=True).times(2 * count + last)
    else:
        yield Transfer("tp", "reduce_scatter", hidden, 1, ranks).times(2 * count + first + again)
        yield Transfer("tp", "reduce_scatter", hidden, 1, ranks, backward=True).times(2 * count + last)
        yield Transfer("tp", "all_gather", hidden / ranks, 1, ranks).times(2 * count + last + 2 * again)
        # A product's backward gathers its input anew for the weight, beside the gradient of the sum behind it.
        yield Transfer("tp", "all_gather", hidden / ranks, 1, ranks, backward=True).times(4 * count + first)
        whole = parameters.norm(job.model).copied * (2 * count + last) + _biases(job) * count
        yield Transfer("tp", "all_reduce", whole * job.element, 2 * count + last, ranks, backward=True)
    if last and job.model.classifier is None:
        chunks = -(-job.tokens // job.config.training.loss_chunk_size)
        # Of each token the largest logit; then the sum of exponentials and the target's logit.
        yield Transfer("tp", "all_reduce", 3 * job.tokens * FLOAT32, 2 * chunks, ranks)
    shared = sum(_shared(job, attention) * alike for attention, alike in layers)
    if shared:
        yield Transfer("tp", "all_reduce", shared * job.element, 2 * count, ranks, backward=True)


def _biases(job: Job) -> int:
    return 2 * job.model.hidden_size if job.model.bias else 0


def _shared(job: Job, attention: Attention) -> int:
    """Numbers of a mechanism that belong to no head, whose gradients the tensor ranks sum."""
    whole = parameters.layer_parameters(job.model, attention, job.seq_len).copied
    return whole - 2 * parameters.norm(job.model).copied - _biases(job)


def over_context(job: Job, attention: Attention) -> Iterator[Transfer]:
    """What one layer's shards exchange."""
    ranks, model = job.layout.context, job.model
    forwards = 1 if job.layout.recompute == "none" else 2
    if attention.trades_heads(model.is_causal):
        yield from (
            _ring(job, attention) if job.passes_keys_round(attention) else _heads(job, attention, forwards)
        )
        return
    tail = activations.tail(job, attention)
    if tail:
        # The first shard sends no gradients and the last no tokens, so of two neither does both.
        both = ranks > 2
        yield Transfer("cp", "all_to_all", tail, 2, ranks).times(forwards)
        if both:
            yield Transfer("cp", "all_to_all", tail, 2, ranks, backward=True)
    if attention.feature_map is not None:
        yield from (one.times(1 if model.is_causal else 2) for one in _states(job, attention, forwards))
    elif attention.compression is not None:
        # Landmarks of all shards, gathered or summed.
        yield from _landmarks(job, attention, forwards)


def _states(job: Job, attention: Attention, forwards: int) -> Iterator[Transfer]:
    """Kernel states, in one direction: to all shards at once, or summed from shard to shard."""
    ranks, state = job.layout.context, activations.state(job, attention)
    scales, carries = job.rows * job.kv_heads * FLOAT32, job.rows * FLOAT32
    parts = job.state_parts(state - scales)
    forward, backward = state + carries, state - scales
    if parts is None:
        yield Transfer("cp", "all_gather", forward, 1, ranks, "attention").times(forwards)
        yield Transfer("cp", "all_gather", backward, 1, ranks, "attention", backward=True)
        return
    # Each shard knows by itself whether it carries.
    yield Transfer("cp", "chain", state, 1, ranks, "attention", parts=parts).times(forwards)
    yield Transfer("cp", "chain", backward, 1, ranks, "attention", backward=True, parts=parts)


def _landmarks(job: Job, attention: Attention, forwards: int) -> Iterator[Transfer]:
    compression, ranks = attention.compression, job.layout.context
    if compression is not None and attention.compresses_input:
        rank = getattr(compression, "rank", 1)
        numbers = job.rows * rank * job.model.hidden_size * 2
        yield Transfer("cp", "all_reduce", numbers * FLOAT32, 1, ranks).times(forwards)
        yield Transfer("cp", "all_reduce", numbers * FLOAT32, 1, ranks, backward=True)
        return
    rank, block = getattr(compression, "rank", 1), attention.block_size or job.seq_len
    vectors = (attention.keys_per_head + 1) * job.kv_heads * rank * -(-job.cp_shard // block)
    size = job.rows * vectors * job.model.head_size * FLOAT32
    yield Transfer("cp", "all_gather", size, 2, ranks).times(forwards)
    yield Transfer("cp", "reduce_scatter", size * ranks, 2, ranks, backward=True)


def _heads(job: Job, attention: Attention, forwards: int) -> Iterator[Transfer]:
    """Ulysses: queries, keys and values there, outputs back, and their gradients the other way."""
    ranks, heads, kv_heads = job.layout.context, job.heads, job.kv_heads
    keys = attention.keys_per_head
    if kv_heads % ranks:  # repeated for their queries
        kv_heads = heads
    vector = job.tokens * job.model.head_size * job.element
    inputs = Transfer("cp", "all_to_all", vector * (heads + (keys + 1) * kv_heads), keys + 2, ranks)
    outputs = Transfer("cp", "all_to_all", vector * heads, 1, ranks)
    yield inputs.times(forwards)
    # Nothing behind the last exchange is kept by the core alone, so that selective recomputation stops before it.
    yield outputs.times(2 if job.layout.recompute == "full" else 1)
    yield from (replace(one, backward=True) for one in (inputs, outputs))
    if job.isolates:
        yield Transfer("cp", "all_gather", job.tokens * INT64, 1, ranks).times(forwards)


def _ring(job: Job, attention: Attention) -> Iterator[Transfer]:
    """Ring attention: every shard's keys and values pass every device; backward their gradients travel along."""
    ranks, forwards = job.layout.context, 1 if job.layout.recompute == "none" else 2
    vectors = (attention.keys_per_head + 1) * job.kv_heads * job.model.head_size
    pair = job.tokens * vectors * job.element
    steps = ranks - 1
    yield Transfer("cp", "send", pair, 1, ranks, "attention").times(steps * forwards)
    # Sums of gradients travel in float32.
    back = pair + job.tokens * vectors * FLOAT32
    yield Transfer("cp", "send", back, 2, ranks, "attention", backward=True).times(steps)


def of_step(job: Job, stage: int) -> Iterator[Transfer]:
    """Gradients and weights, once a step or, where ZeRO shards gradients, once a micro-batch."""
    layout, ranks = job.layout, job.layout.gradient
    model = job.model
    count = job.parameters[stage]
    if ranks > 1:
        passes = job.micro_batches if layout.zero_stage >= 2 else 1
        operation: Operation = "reduce_scatter" if layout.zero_stage == 3 else "all_reduce"
        yield Transfer("gradient", operation, count * FLOAT32, 1, ranks, backward=True).times(passes)
        if layout.zero_stage:
            # Weights that ZeRO 3 does not keep are gathered for each forward and backward.
            again = layout.zero_stage == 3 and count > LIVE
            gathers = 2 * job.micro_batches if again else 1
            yield Transfer("gradient", "all_gather", count * job.element / ranks, 1, ranks).times(gathers)
    if layout.pipeline > 1 and holds_second_embedding(model) and stage in (0, layout.pipeline - 1):
        rows = parameters.embedding(model, parameters.embedding_rows(model, job.vocab_size))
        yield Transfer("pp", "all_reduce", rows.on_rank(layout.tensor) * FLOAT32, 1, 2, backward=True)
