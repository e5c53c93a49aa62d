"""How long transfers take between devices that lie in nodes."""

from .gpus import Gpu
from .layout import Layout
from .rates import Rates
from .traffic import Transfer


def seconds(transfer: Transfer, layout: Layout, gpu: Gpu, rates: Rates) -> float:
    """Bytes over the slowest link of the group's ring, and a latency for each of its steps.

    A ring that leaves a node uses the network adapters of all its devices there. A chain has arrived when all parts of
    its message have passed all ranks, one behind the other.
    """
    if transfer.ranks == 1 or transfer.bytes == 0:
        return 0.0
    inside = ranks_in_node(transfer, layout, gpu)
    link = gpu.link * rates.link
    outside = inside < transfer.ranks
    speed = min(link, inside * gpu.network * rates.network) if outside else link
    if transfer.operation == "all_to_all" and outside:
        # All that is for other nodes passes the device's own adapter.
        speed = gpu.network * rates.network
    if transfer.operation in ("send", "chain"):
        speed = gpu.network * rates.network if outside else link
    if transfer.operation == "chain":
        hops, hop = (
            transfer.ranks + transfer.parts - 2,
            rates.network_latency if outside else rates.link_latency,
        )
        return hops * (transfer.bytes / transfer.parts / speed + transfer.calls * hop)
    hops = 1 if transfer.operation == "send" else transfer.ranks - 1
    across = 0 if not outside else 1 if transfer.operation == "send" else transfer.ranks // inside
    latency = (hops - min(hops, across)) * rates.link_latency + across * rates.network_latency
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
