"""Launches Triton kernels, or records their launches, which needs no GPU. There is no autotuning."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES, capability_of_gpu
from megakernel.ops.kernels.primitives import INTERPRETED

MIN_PROGRAMS = 512
"""Desired minimum of programs per launch: about four per multiprocessor of the largest GPUs."""

MAX_ROW_STRIDE = 2**20
"""Largest row stride, in elements, that kernels accept without a copy: offsets in tiles of 1,024 rows fit 32 bits."""


def fits_rows(stride: int) -> bool:
    """Whether kernels accept rows that are this many elements apart."""
    return stride <= MAX_ROW_STRIDE


def contiguous_rows(x: Tensor) -> Tensor:
    """`x` with contiguous rows at most MAX_ROW_STRIDE apart; copied only if necessary."""
    return x if x.stride(-1) == 1 and fits_rows(x.stride(-2)) else x.contiguous()


class Rows(NamedTuple):
    """A tensor (B, H, N, width) with contiguous rows, and its strides."""

    pointer: Any
    batch: int
    head: int
    row: int

    @staticmethod
    def of(x: Tensor) -> "Rows":
        """`x`; copied only if `contiguous_rows` copies it."""
        x = contiguous_rows(x)
        return Rows(x, x.stride(0), x.stride(1), x.stride(2))

    @staticmethod
    def to_write(x: Tensor) -> "Rows":
        """`x` itself, for a kernel that writes to it."""
        rows = Rows.of(x)
        assert rows.pointer is x, f"rows with strides {x.stride()} would be written to a copy"
        return rows


class Launch(NamedTuple):
    """A recorded launch that did not run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """Tensors, numbers, None, and tuples of these, in the order of the kernel's parameters."""

    options: dict[str, Any]
    """Compile-time arguments by name."""

    warps: int
    stages: int


DEFAULT_CAPABILITY = 90
"""The compute capability that kernels are sized for without a GPU."""

WARPS_OF_WARPGROUP = 4
"""Warps that share one wgmma, the asynchronous matrix product of compute capability 9.0."""

_recorded: list[Launch] | deque[Launch] | None = None
_recorded_for = DEFAULT_CAPABILITY


@contextmanager
def record_launches(capability: int = DEFAULT_CAPABILITY, *, keep: bool = True) -> Iterator[list[Launch]]:
    """Record launches instead of running them: shows what a GPU would run, on a machine without one.

    keep: whether to list them, which keeps their tensors alive; otherwise the list stays empty.
    """
    global _recorded, _recorded_for
    launches: list[Launch] = []
    _recorded, _recorded_for = launches if keep else deque(maxlen=0), capability
    try:
        yield launches
    finally:
        _recorded = None


def is_recording() -> bool:
    """Whether launches are recorded instead of run."""
    return _recorded is not None


def capability_of(device: torch.device) -> int:
    """The compute capability that launches on `device` target, 90 for 9.0."""
    if _recorded is not None:
        return _recorded_for
    if device.type != "cuda":
        return DEFAULT_CAPABILITY
    return capability_of_gpu(device)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **options: Any
) -> None:
    """Launch `kernel` on the device of its first tensor.

    Programs have at most one warpgroup where there is wgmma: Triton up to 3.7 does not let one warpgroup wait for the
    product of another before it writes to the memory that this product reads (triton-lang/triton, issue 11047). Larger
    programs gave other numbers from run to run on an H200, or illegal addresses.
    """
    device = next(_tensors(arguments)).device
    if capability_of(device) in WGMMA_CAPABILITIES:
        warps = min(warps, WARPS_OF_WARPGROUP)
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, arguments, options, warps, stages))
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, num_warps=warps, num_stages=stages)


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among arguments, including those in tuples."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensors(argument)


def unsupported_device(device: torch.device) -> str | None:
    """Why kernels cannot run on `device`; None if they can."""
    if device.type == "cuda" or INTERPRETED.value or is_recording():
        return None
    return f"tensors are on {device}; expected cuda, or TRITON_INTERPRET=1"
