"""Bytes that one device passes to collectives in a step.

Messages of the model's parts are measured; those of DeepSpeed follow from ZeRO's stage and the pipeline.

`tests/distributed/test_planned_traffic.py` checks that real processes send exactly these bytes.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from .layout import PlannedJob
from .memory import FLOAT32, INT64, ZERO3_LIVE, sums_in_float32

if TYPE_CHECKING:
    from .part_costs import Part

Group = Literal["tp", "cp", "gradient", "pp"]


@dataclass(frozen=True)
class Transfer:
    """Messages of one kind of one device in one group."""

    group: Group
    """tp, cp, gradient (data x context) or pp."""

    operation: str
    """See `ledger.Message`."""

    bytes: float
    """Bytes that the device passes in, of all messages together."""

    ranks: int
    """Size of the group."""

    @property
    def sent(self) -> float:
        """Bytes that leave the device: those of a ring's steps, or the share of an all-to-all for other ranks."""
        others = self.ranks - 1
        factors = {
            "all_reduce": 2 * others / self.ranks,
            "all_gather": others,
            "reduce_scatter": others / self.ranks,
            "all_to_all": others / self.ranks,
            "send": 1,
        }
        return self.bytes * factors[self.operation]

    def times(self, count: float) -> "Transfer":
        """`count` such transfers."""
        return replace(self, bytes=self.bytes * count)


def sent_bytes(job: PlannedJob) -> dict[str, float]:
    """Bytes that leave one device in a step, by group, on the stage that sends most."""
    stages: list[dict[str, float]] = []
    for stage in job.distinct_stages:
        sent: dict[str, float] = defaultdict(float)
        for transfer in traffic(job, stage):
            sent[transfer.group] += transfer.sent
        stages.append(dict(sent))
    return max(stages, key=lambda sent: sum(sent.values()))


def traffic(job: PlannedJob, stage: int) -> list[Transfer]:
    """All transfers of one step of one device of a stage; its context rank has neighbors on both sides if any has."""
    per_micro_batch = [*_micro_batch_transfers(job, stage)]
    return [transfer.times(job.micro_batches) for transfer in per_micro_batch] + [*step_transfers(job, stage)]


def _micro_batch_transfers(job: PlannedJob, stage: int) -> Iterator[Transfer]:
    """Transfers of one micro-batch, forward and backward."""
    layout = job.layout
    for part, count in job.parts(stage):
        yield from (transfer.times(count) for transfer in part_transfers(job, part))
    if layout.pipeline > 1:
        hidden = job.sharded_tokens * job.model.hidden_size * job.element
        # Positions, labels, how many of them count, and numbers for dropout.
        labels = job.tokens * (3 if job.model.dropout.any else 2) * INT64 + INT64
        if stage < layout.pipeline - 1:
            yield Transfer("pp", "send", hidden + labels, layout.pipeline)
        if stage > 0:
            yield Transfer("pp", "send", hidden, layout.pipeline)


def part_transfers(job: PlannedJob, part: "Part") -> Iterator[Transfer]:
    """Transfers of a layer, the embedding or the head in one micro-batch."""
    tensor = job.layout.tensor
    ranks = {"tp": tensor, "cp": job.layout.context, "copies": tensor // job.model.kv_heads}
    for (axis, operation), amount in job.costs(part).sent.items():
        group: Group = "cp" if axis == "cp" else "tp"
        if amount:
            yield Transfer(group, operation, amount, ranks[axis])


def muon_owners(job: PlannedJob, stage: int) -> Iterator[tuple[int, int, int]]:
    """(size, first, last) of each of Muon's matrices: the ranks of a data-parallel group that update parts of it."""
    sizes = job.matrices(stage)
    ranks = job.layout.gradient if job.layout.zero_stage else 1
    share, end = 2 * -(-sum(sizes) // (2 * ranks)), 0  # DeepSpeed's partitions begin at even places
    for size in sizes:
        begin, end = end, end + size
        yield size, begin // share, (end - 1) // share


def step_transfers(job: PlannedJob, stage: int) -> Iterator[Transfer]:
    """Transfers of gradients and weights: once per step, or per micro-batch if ZeRO shards gradients."""
    layout, ranks = job.layout, job.layout.gradient
    count, trained = job.parameters[stage], job.trained[stage]
    if ranks > 1:
        passes = job.micro_batches if layout.zero_stage >= 2 else 1
        scatters = layout.zero_stage == 3 or sums_in_float32(job)
        operation = "reduce_scatter" if scatters else "all_reduce"
        yield Transfer("gradient", operation, trained * FLOAT32, ranks).times(passes)
        if layout.zero_stage:
            # More weights than ZERO3_LIVE are gathered for each forward and each backward.
            gathers_again = layout.zero_stage == 3 and count > ZERO3_LIVE
            gathers = 2 * job.micro_batches if gathers_again else 1
            gathered = (count if layout.zero_stage == 3 else trained) * job.element
            yield Transfer("gradient", "all_gather", gathered / ranks, ranks).times(gathers)
    for size, first, last in muon_owners(job, stage):
        if layout.tensor > 1 and first == 0:
            yield Transfer("tp", "all_gather", size * FLOAT32, layout.tensor)
        if first < last:
            yield Transfer("gradient", "all_reduce", size * FLOAT32, ranks)
    last = layout.pipeline - 1
    if last and stage in (0, last) and job.ties_embedding and job.trains_embedding:
        yield Transfer("pp", "all_reduce", job.embedding * FLOAT32, 2)
