"""Limits of GPUs and their nodes from datasheets, and the assumed shares of these limits that work reaches.

Bandwidths are those of one direction: a device of a ring sends and receives at the same time. Gigabytes are 10^9
bytes, as in datasheets.
"""

from dataclasses import dataclass, replace

from megakernel.training.observing.peak_speed import DENSE_BF16_TFLOPS

RATES = {
    "matrix": 0.65,  # projections, MLP and head: share of the peak
    "softmax": 0.5,  # fused softmax attention: share of the peak
    "kernel": 0.06,  # feature maps, states, landmarks and windows: share of the peak
    "memory": 0.75,  # everything but matrix products: share of the memory's bandwidth
    "link": 0.75,  # collectives inside a node: share of the link
    "network": 0.8,  # collectives between nodes: share of the network
    "link_latency": 3e-6,  # one step of a ring inside a node, in seconds
    "network_latency": 8e-6,  # one step of a ring between nodes
}
"""The assumptions of all predictions. The shares are round numbers in the range that similar trainers report.

That of kernels was measured: the times of benchmarks/results/kernel_times.md, forward and backward, are 0.03 to 0.15 of
an H200's peak, those of FLuRKA 0.03 (heads of 64) and 0.06 (of 128).
"""

RATES_SOURCE = "kernel as measured on an H200, the others assumed"

RATES_TEXT = f"({RATES_SOURCE}): {', '.join(f'{name} {value:g}' for name, value in RATES.items())}"
"""RATES and their source on one line."""

ACCURACY = {
    "kept": "bytes kept by a layer: off by +0.0% to +0.0%",
    "held": "bytes held at most: off by -4.4% to +1.1%",
}
"""Errors of the same model on a CPU: lines of benchmarks/results/plan_calibration_cpu.md; a test compares them."""


@dataclass(frozen=True)
class Gpu:
    """One device and its node."""

    name: str

    memory: float
    """Bytes."""

    bandwidth: float
    """Bytes per second between the device and its memory."""

    peak: float
    """FLOP/s of dense matrix products in bfloat16."""

    peak_float32: float
    """FLOP/s in float32 without tensor cores, torch's default."""

    link: float
    """Bytes per second that one device sends to the others of its node."""

    network: float
    """Bytes per second that one device's network adapter sends to other nodes."""

    per_node: int
    """Devices of one node."""

    source: str
    """The datasheets."""

    def peak_of(self, element: int) -> float:
        """Peak FLOP/s for numbers of this many bytes."""
        return self.peak if element == 2 else self.peak_float32

    def flops(self, work: str, element: int) -> float:
        """Assumed FLOP/s of this kind of work, a key of RATES."""
        return self.peak_of(element) * RATES[work]

    def transfer_seconds(self, count: float) -> float:
        """Seconds to move `count` bytes from or to the device's memory."""
        return count / (self.bandwidth * RATES["memory"])

    def with_network(self, gigabits: float | None, per_node: int | None) -> "Gpu":
        """The same device with another network, in Gbit/s per device, or in nodes of another size."""
        network = self.network if gigabits is None else gigabits * 1e9 / 8
        return replace(self, network=network, per_node=per_node or self.per_node)


_A100 = Gpu(
    # NVIDIA A100 80 GB SXM datasheet; NVLink's 600 GB/s count both ways. DGX A100 datasheet: 8 devices, each with a
    # ConnectX-6 of 200 Gbit/s.
    name="NVIDIA A100 80 GB SXM",
    memory=80e9,
    bandwidth=2.039e12,
    peak=DENSE_BF16_TFLOPS["A100"] * 1e12,
    peak_float32=19.5e12,
    link=300e9,
    network=25e9,
    per_node=8,
    source="NVIDIA A100 and DGX A100 datasheets",
)
_H100 = Gpu(
    # NVIDIA H100 SXM datasheet: 1,979 TFLOP/s with sparsity, half of it without; NVLink's 900 GB/s count both ways.
    # DGX H100 datasheet: 8 devices, each with a ConnectX-7 of 400 Gbit/s.
    name="NVIDIA H100 SXM",
    memory=80e9,
    bandwidth=3.35e12,
    peak=DENSE_BF16_TFLOPS["H100"] * 1e12,
    peak_float32=67e12,
    link=450e9,
    network=50e9,
    per_node=8,
    source="NVIDIA H100 and DGX H100 datasheets",
)
_H200 = replace(
    _H100,  # NVIDIA H200 SXM and DGX H200 datasheets: more and faster memory, otherwise an H100
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
    peak=DENSE_BF16_TFLOPS["B200"] * 1e12,
    peak_float32=75e12,
    link=900e9,
    network=50e9,
    per_node=8,
    source="NVIDIA DGX B200 and HGX B200 datasheets",
)

GPUS = {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200}
"""Name on the command line -> device."""
