"""Bytes that one device hands to collectives in a step, and how long that takes between devices in nodes.

What the model's parts send is measured; what DeepSpeed sends follows from ZeRO's stage and the pipeline.

`tests/distributed/test_planned_traffic.py` holds these counts against what real processes send, to the byte.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from megakernel.parallel.exchange_way import parts

from .gpus import RATES, Gpu
from .layout import Job, Layout
from .memory import FLOAT32, INT64, LIVE

if TYPE_CHECKING:
    from .measured import Part

Group = Literal["tp", "cp", "gradient", "pp"]


@dataclass(frozen=True)
class Transfer:
    """Equal messages of one device over one group."""

    group: Group
    """Over whom: tp, cp, gradient (data x context) or pp."""

    operation: str
    """See `ledger.Sent`."""

    bytes: float
    """Bytes that the device hands in, all messages together."""

    calls: float
    """Messages."""

    ranks: int
    """Devices of the group."""

    is_hidden: bool = False
    """Whether attention works meanwhile."""

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
            "point-to-point": 1,
        }
        return self.bytes * factors[self.operation]

    def times(self, count: float) -> "Transfer":
        """As many such transfers."""
        return replace(self, bytes=self.bytes * count, calls=self.calls * count)


def traffic(job: Job, stage: int) -> list[Transfer]:
    """All transfers of one step of a device of a pipeline stage that has neighbours on both sides where any has."""
    per_micro_batch = [*of_micro_batch(job, stage)]
    return [one.times(job.micro_batches) for one in per_micro_batch] + [*of_step(job, stage)]


def of_micro_batch(job: Job, stage: int) -> Iterator[Transfer]:
    """Transfers of forward and backward of one micro-batch."""
    layout = job.layout
    for part, count in job.parts(stage):
        yield from (one.times(count) for one in of_part(job, part))
    if layout.pipeline > 1:
        hidden = job.sharded_tokens * job.model.hidden_size * job.element
        labels = job.tokens * 2 * INT64 + INT64  # positions, labels and how many of them count
        if stage < layout.pipeline - 1:
            yield Transfer("pp", "send", hidden + labels, 4, layout.pipeline)
        if stage > 0:
            yield Transfer("pp", "send", hidden, 1, layout.pipeline, backward=True)


def of_part(job: Job, part: "Part") -> Iterator[Transfer]:
    """Transfers of a layer, the embedding or the head for one micro-batch."""
    ranks = {"tp": job.layout.tensor, "cp": job.layout.context}
    for (axis, name, backward, waits), (amount, calls) in job.measured(part).sent.items():
        group: Group = "tp" if axis == "tp" else "cp"
        # Other ranks' states and keys arrive while attention works.
        is_hidden = not waits and group == "cp"
        sent = Transfer(group, name, amount, calls, ranks[group], is_hidden, backward)
        if sent.operation == "point-to-point" and calls:
            sent = replace(sent, parts=parts(sent.ranks, round(amount / calls)))
        if amount:
            yield sent


def of_step(job: Job, stage: int) -> Iterator[Transfer]:
    """Gradients and weights, once a step or, where ZeRO shards gradients, once a micro-batch."""
    layout, ranks = job.layout, job.layout.gradient
    count = job.parameters[stage]
    if ranks > 1:
        passes = job.micro_batches if layout.zero_stage >= 2 else 1
        operation = "reduce_scatter" if layout.zero_stage == 3 else "all_reduce"
        yield Transfer("gradient", operation, count * FLOAT32, 1, ranks, backward=True).times(passes)
        if layout.zero_stage:
            # Weights that ZeRO 3 does not keep are gathered for each forward and backward.
            again = layout.zero_stage == 3 and count > LIVE
            gathers = 2 * job.micro_batches if again else 1
            yield Transfer("gradient", "all_gather", count * job.element / ranks, 1, ranks).times(gathers)
    if layout.pipeline > 1 and job.holds_second_embedding and stage in (0, layout.pipeline - 1):
        yield Transfer("pp", "all_reduce", job.embedding * FLOAT32, 1, 2, backward=True)


def seconds(transfer: Transfer, layout: Layout, gpu: Gpu) -> float:
    """Bytes over the slowest link of the group's ring, and a latency for each of its steps.

    A ring that leaves a node uses the network adapters of all its devices there. A chain has arrived when all parts of
    its message have passed all ranks, one behind the other.
    """
    if transfer.ranks == 1 or transfer.bytes == 0:
        return 0.0
    inside = ranks_in_node(transfer, layout, gpu)
    link, network = gpu.link * RATES["link"], gpu.network * RATES["network"]
    outside, to_next = inside < transfer.ranks, transfer.operation in ("send", "point-to-point")
    speed = min(link, inside * network) if outside else link
    if outside and (to_next or transfer.operation == "all_to_all"):
        speed = network  # all that is for other nodes passes the device's own adapter
    if transfer.operation == "point-to-point":
        hop = RATES["network_latency"] if outside else RATES["link_latency"]
        hops = transfer.ranks + transfer.parts - 2
        return hops * (transfer.bytes / transfer.parts / speed + transfer.calls * hop)
    hops = 1 if to_next else transfer.ranks - 1
    across = 0 if not outside else 1 if to_next else transfer.ranks // inside
    latency = (hops - min(hops, across)) * RATES["link_latency"] + across * RATES["network_latency"]
    if transfer.operation == "all_reduce":
        latency *= 2
    return transfer.sent / speed + transfer.calls * latency


def ranks_in_node(transfer: Transfer, layout: Layout, gpu: Gpu) -> int:
    """Neighbouring ranks of a group that share a node: tp varies fastest, then cp, dp and pp."""
    strides = {
        "tp": 1,
        "cp": layout.tensor,
        "gradient": layout.tensor,
        "pp": layout.tensor * layout.gradient,
    }
    return max(1, min(transfer.ranks, gpu.per_node // strides[transfer.group]))
