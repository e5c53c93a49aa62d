"""Limits of GPUs and their nodes from datasheets, and the steps that were measured on them.

Gigabytes are 10^9 bytes, as in datasheets.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec

from megakernel.training.observing.peak_speed import DENSE_BF16_TFLOPS

ACCURACY = {
    "kept": "bytes kept by a layer: off by +0.0% to +0.0%",
    "held": "bytes held at most: off by -4.4% to +1.1%",
}
"""Errors of the same model on a CPU: lines of benchmarks/results/plan_calibration_cpu.md; a test compares them."""

CHUNKED_FORM = (0.88, 1.07)
"""What layers of the 350m model keep in chunked form, relative to kernels, for plans without Triton; a test has it."""


def counts_kernels() -> bool:
    """Whether plans for GPUs count what our kernels save; without Triton it is what chunked forms save."""
    return find_spec("triton") is not None


@dataclass(frozen=True)
class MeasuredStep:
    """The share of a GPU's peak that a training step of this system was measured to reach."""

    what: str
    """Model, size and date."""

    parameters: float

    seq_len: int

    mfu: tuple[float, float]
    """Least and most of the measured steps."""

    source: str
    """A page of this repository."""

    @property
    def middle(self) -> float:
        """The middle of `mfu`, with which predictions are made."""
        return sum(self.mfu) / 2


@dataclass(frozen=True)
class Gpu:
    """One device and its node."""

    name: str

    memory: float
    """Bytes."""

    peak: float
    """FLOP/s of dense matrix products in bfloat16."""

    peak_float32: float
    """FLOP/s in float32 without tensor cores, torch's default."""

    per_node: int
    """Devices of one node."""

    source: str
    """The datasheets."""

    measured: tuple[MeasuredStep, ...] = ()
    """Training steps that were measured on this GPU, in bfloat16."""

    def peak_of(self, element: int) -> float:
        """Peak FLOP/s for numbers of this many bytes."""
        return self.peak if element == 2 else self.peak_float32


_A100 = Gpu(
    # NVIDIA A100 80 GB SXM and DGX A100 datasheets.
    name="NVIDIA A100 80 GB SXM",
    memory=80e9,
    peak=DENSE_BF16_TFLOPS["A100"] * 1e12,
    peak_float32=19.5e12,
    per_node=8,
    source="NVIDIA A100 and DGX A100 datasheets",
)
_H100 = Gpu(
    # NVIDIA H100 SXM datasheet: 1,979 TFLOP/s with sparsity, half of it without.
    name="NVIDIA H100 SXM",
    memory=80e9,
    peak=DENSE_BF16_TFLOPS["H100"] * 1e12,
    peak_float32=67e12,
    per_node=8,
    source="NVIDIA H100 and DGX H100 datasheets",
)
_H200 = replace(
    _H100,  # NVIDIA H200 SXM and DGX H200 datasheets: more and faster memory, otherwise an H100
    name="NVIDIA H200 SXM",
    memory=141e9,
    source="NVIDIA H200 and DGX H200 datasheets",
    measured=(
        MeasuredStep(
            "configs/pretrain-350m.yaml with 257 ids, micro-batches of 4, on one GPU, 2026-11-27",
            parameters=0.31e9,
            seq_len=8192,
            mfu=(0.18, 0.21),
            source="docs/results.md",
        ),
    ),
)
_B200 = Gpu(
    # NVIDIA DGX B200 datasheet, over its 8 devices: 1,440 GB, 72 PFLOP/s of FP8 with sparsity (a quarter of that in
    # dense bfloat16). HGX B200 datasheet: 600 TFLOP/s of float32.
    name="NVIDIA B200 in a DGX B200",
    memory=180e9,
    peak=DENSE_BF16_TFLOPS["B200"] * 1e12,
    peak_float32=75e12,
    per_node=8,
    source="NVIDIA DGX B200 and HGX B200 datasheets",
)

GPUS = {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200}
"""Name on the command line -> device."""
