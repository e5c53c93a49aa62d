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

    peak_float32: float
    """FLOP/s in float32 without tensor cores, which is what torch takes unless it is told otherwise."""

    link: float
    """Bytes per second that one device sends to the others of its node."""

    network: float
    """Bytes per second that one device's network adapter sends to other nodes."""

    per_node: int
    """Devices of one node."""

    source: str
    """Where the numbers are from."""

    def peak_of(self, element: int) -> float:
        """The peak for numbers of so many bytes."""
        return self.peak if element == 2 else self.peak_float32

    def with_network(self, gigabits: float | None, per_node: int | None) -> "Gpu":
        """The same device behind another network, in Gbit/s per device, or in nodes of another size."""
        network = self.network if gigabits is None else gigabits * 1e9 / 8
        return replace(self, network=network, per_node=per_node or self.per_node)


_A100 = Gpu(
    # NVIDIA A100 80 GB SXM datasheet; NVLink's 600 GB/s count both ways. DGX A100 datasheet: 8 devices, and for each a
    # ConnectX-6 of 200 Gbit/s.
    name="NVIDIA A100 80 GB SXM",
    memory=80e9,
    bandwidth=2.039e12,
    peak=312e12,
    peak_float32=19.5e12,
    link=300e9,
    network=25e9,
    per_node=8,
    source="NVIDIA A100 and DGX A100 datasheets",
)
_H100 = Gpu(
    # NVIDIA H100 SXM datasheet: 1,979 TFLOP/s with sparsity, half of it without; NVLink's 900 GB/s count both ways.
    # DGX H100 datasheet: 8 devices, and for each a ConnectX-7 of 400 Gbit/s.
    name="NVIDIA H100 SXM",
    memory=80e9,
    bandwidth=3.35e12,
    peak=989e12,
    peak_float32=67e12,
    link=450e9,
    network=50e9,
    per_node=8,
    source="NVIDIA H100 and DGX H100 datasheets",
)
_H200 = replace(
    _H100,  # NVIDIA H200 SXM and DGX H200 datasheets: more and faster memory, all else alike
    name="NVIDIA H200 SXM",
    memory=141e9,
    bandwidth=4.8e12,
    source="NVIDIA H200 and DGX H200 datasheets",
)
_B200 = Gpu(
    # NVIDIA DGX B200 datasheet, over its 8 devices: 1,440 GB, 64 TB/s, 72 PFLOP/s of FP8 with sparsity (a quarter
    # of that in dense bfloat16), NVLink's 14.4 TB/s both ways, ConnectX-7 of 400 Gbit/s. HGX B200 datasheet:
    # 600 TFLOP/s of float32.
    name="NVIDIA B200 in a DGX B200",
    memory=180e9,
    bandwidth=8e12,
    peak=2250e12,
    peak_float32=75e12,
    link=900e9,
    network=50e9,
    per_node=8,
    source="NVIDIA DGX B200 and HGX B200 datasheets",
)

GPUS = {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200}
"""Name on the command line -> device."""
