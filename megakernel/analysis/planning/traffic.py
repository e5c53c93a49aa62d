"""Bytes that one device passes to collectives in a step, and their time on links and networks.

Messages of the model's parts are measured; those of DeepSpeed follow from ZeRO's stage and the pipeline.

`tests/distributed/test_planned_traffic.py` checks that real processes send exactly these bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megakernel.parallel.exchange_method import ring_parts

from .gpus import RATES, Gpu
from .layout import Job, Layout
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

    calls: float
    """Number of messages."""

    ranks: int
    """Size of the group."""

    is_hidden: bool = False
    """Whether it overlaps with attention."""

    backward: bool = False
    """Whether it happens in backward."""

    parts: int = 1
    """Parts of a point-to-point message: a rank passes on one part while it receives the next."""

    distance: int = 1
    """Distance of two ranks that exchange messages, in ranks of the group."""

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
            "point-to-point": 1,
        }
        return self.bytes * factors[self.operation]

    def times(self, count: float) -> "Transfer":
        """`count` such transfers."""
        return replace(self, bytes=self.bytes * count, calls=self.calls * count)


def traffic(job: Job, stage: int) -> list[Transfer]:
    """All transfers of one step of one device of a stage; its context rank has neighbors on both sides if any has."""
    per_micro_batch = [*micro_batch_transfers(job, stage)]
    return [transfer.times(job.micro_batches) for transfer in per_micro_batch] + [*step_transfers(job, stage)]


def micro_batch_transfers(job: Job, stage: int) -> Iterator[Transfer]:
    """Transfers of one micro-batch, forward and backward."""
    layout = job.layout
    for part, count in job.parts(stage):
        yield from (transfer.times(count) for transfer in part_transfers(job, part))
    if layout.pipeline > 1:
        hidden = job.sharded_tokens * job.model.hidden_size * job.element
        labels = job.tokens * 2 * INT64 + INT64  # positions, labels and how many of them count
        if stage < layout.pipeline - 1:
            yield Transfer("pp", "send", hidden + labels, 4, layout.pipeline)
        if stage > 0:
            yield Transfer("pp", "send", hidden, 1, layout.pipeline, backward=True)


def part_transfers(job: Job, part: "Part") -> Iterator[Transfer]:
    """Transfers of a layer, the embedding or the head in one micro-batch."""
    ranks = {"tp": job.layout.tensor, "cp": job.layout.context}
    for (axis, name, backward, is_synchronous), (amount, calls) in job.costs(part).sent.items():
        group: Group = "tp" if axis == "tp" else "cp"
        # Attention overlaps with asynchronous exchange of states and keys.
        is_hidden = not is_synchronous and group == "cp"
        sent = Transfer(group, name, amount, calls, ranks[group], is_hidden, backward)
        if sent.operation == "point-to-point" and calls:
            sent = replace(sent, parts=ring_parts(sent.ranks, round(amount / calls)))
        if amount:
            yield sent


def step_transfers(job: Job, stage: int) -> Iterator[Transfer]:
    """Transfers of gradients and weights: once per step, or per micro-batch if ZeRO shards gradients."""
    layout, ranks = job.layout, job.layout.gradient
    count, trained = job.parameters[stage], job.trained[stage]
    if ranks > 1:
        passes = job.micro_batches if layout.zero_stage >= 2 else 1
        scatters = layout.zero_stage == 3 or sums_in_float32(job)
        operation = "reduce_scatter" if scatters else "all_reduce"
        yield Transfer("gradient", operation, trained * FLOAT32, 1, ranks, backward=True).times(passes)
        if layout.zero_stage:
            # More weights than ZERO3_LIVE are gathered for each forward and each backward.
            gathers_again = layout.zero_stage == 3 and count > ZERO3_LIVE
            gathers = 2 * job.micro_batches if gathers_again else 1
            gathered = (count if layout.zero_stage == 3 else trained) * job.element
            yield Transfer("gradient", "all_gather", gathered / ranks, 1, ranks).times(gathers)
    last = layout.pipeline - 1
    if last and stage in (0, last) and job.ties_embedding and job.trains_embedding:
        yield Transfer("pp", "all_reduce", job.embedding * FLOAT32, 1, 2, backward=True, distance=last)


def seconds(transfer: Transfer, layout: Layout, gpu: Gpu) -> float:
    """Seconds of a transfer: bytes over the slowest link of the group's ring, plus a latency for each of its steps.

    A ring that leaves a node uses the network adapters of all its devices there. A point-to-point message takes until
    its last part has passed all ranks.
    """
    if transfer.ranks == 1 or transfer.bytes == 0:
        return 0.0
    ranks_inside = ranks_in_node(transfer, layout, gpu)
    link, network = gpu.link * RATES["link"], gpu.network * RATES["network"]
    leaves_node, to_next = ranks_inside < transfer.ranks, transfer.operation in ("send", "point-to-point")
    speed = min(link, ranks_inside * network) if leaves_node else link
    if leaves_node and (to_next or transfer.operation == "all_to_all"):
        speed = network  # traffic to other nodes goes through the device's own adapter
    if transfer.operation == "point-to-point":
        hop = RATES["network_latency"] if leaves_node else RATES["link_latency"]
        hops = transfer.ranks + transfer.parts - 2
        return hops * (transfer.bytes / transfer.parts / speed + transfer.calls * hop)
    hops = 1 if to_next else transfer.ranks - 1
    across = 0 if not leaves_node else 1 if to_next else transfer.ranks // ranks_inside
    latency = (hops - min(hops, across)) * RATES["link_latency"] + across * RATES["network_latency"]
    if transfer.operation == "all_reduce":
        latency *= 2
    return transfer.sent / speed + transfer.calls * latency


def ranks_in_node(transfer: Transfer, layout: Layout, gpu: Gpu) -> int:
    """Number of adjacent ranks of a group on one node: tp varies fastest, then cp, dp and pp."""
    strides = {
        "tp": 1,
        "cp": layout.tensor,
        "gradient": layout.tensor,
        "pp": layout.tensor * layout.gradient,
    }
    in_node = gpu.per_node // strides[transfer.group]
    return max(1, min(transfer.ranks, (in_node - 1) // transfer.distance + 1))
