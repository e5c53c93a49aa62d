"""What GPUs and the nodes they stand in can do, from their makers' datasheets.

Bandwidths count one direction, which is what a ring uses in each. Gigabytes are 10^9 bytes, as datasheets count.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """One device in its node."""

    name: str

    memory: float
    """Bytes."""

    bandwidth: float
    """Bytes per second between the device and its memory."""

    peak: float
    """FLOP/s of dense matrix products in bfloat16."""

    link: float
    """Bytes per second that one device sends to the others of its node."""

    network: float
    """Bytes per second that one device's network adapter sends to other nodes."""

    per_node: int
    """Devices of one node."""

    source: str
    """Where the numbers are from."""

    def with_network(self, gigabits: float | None, per_node: int | None) -> "Gpu":
        """The same device behind another network, in Gbit/s per device, or in nodes of another size."""
        network = self.network if gigabits is None else gigabits * 1e9 / 8
        return replace(self, network=network, per_node=per_node or self.per_node)


GPUS = {
    # NVIDIA A100 80 GB SXM datasheet: 2,039 GB/s, 312 TFLOP/s, NVLink 600 GB/s both ways. DGX A100 datasheet:
    # 8 devices, a 200 Gbit/s ConnectX-6 for each.
    "a100": Gpu(
        "NVIDIA A100 80 GB SXM", 80e9, 2.039e12, 312e12, 300e9, 25e9, 8, "NVIDIA A100 and DGX A100 datasheets"
    ),
    # NVIDIA H100 SXM datasheet: 80 GB, 3.35 TB/s, 1,979 TFLOP/s with sparsity, half of it without, NVLink 900 GB/s both
    # ways. DGX H100 datasheet: 8 devices, a 400 Gbit/s ConnectX-7 for each.
    "h100": Gpu(
        "NVIDIA H100 SXM", 80e9, 3.35e12, 989e12, 450e9, 50e9, 8, "NVIDIA H100 and DGX H100 datasheets"
    ),
    # NVIDIA H200 SXM datasheet: 141 GB, 4.8 TB/s, otherwise H100's numbers. DGX H200 datasheet: as DGX H100.
    "h200": Gpu(
        "NVIDIA H200 SXM", 141e9, 4.8e12, 989e12, 450e9, 50e9, 8, "NVIDIA H200 and DGX H200 datasheets"
    ),
    # NVIDIA DGX B200 datasheet, divided by its 8 devices: 1,440 GB, 64 TB/s, 72 PFLOP/s of FP8 with sparsity (an eighth
    # of a quarter of that for dense bfloat16), NVLink 14.4 TB/s both ways; a 400 Gbit/s ConnectX-7 for each device.
    "b200": Gpu(
        "NVIDIA B200 in a DGX B200", 180e9, 8e12, 2250e12, 900e9, 50e9, 8, "NVIDIA DGX B200 datasheet"
    ),
}
"""Name on the command line -> device."""
