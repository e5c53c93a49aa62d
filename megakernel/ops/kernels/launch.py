"""How kernels over segments are launched: fixed tables of shapes, nothing that is tried out at run time."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.kernels.features import INTERPRETED

PROGRAMS = 512
"""Programs that a launch should have at least: four on each processor of the largest chips."""

FARTHEST = 2**20
"""Numbers between two rows of a tensor that kernels take as it is: tiles of 1,024 rows or fewer count in 32 bits."""


def rows_together(x: Tensor) -> Tensor:
    """`x` with unit stride along its last dimension and rows at most FARTHEST apart, copied only where it has not."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


class Rows(NamedTuple):
    """A tensor (B, H, N, width) whose rows are numbers beside each other."""

    pointer: Any
    batch: int
    head: int
    row: int

    @staticmethod
    def of(x: Tensor) -> "Rows":
        """`x`, copied only where its rows are apart."""
        x = rows_together(x)
        return Rows(x, x.stride(0), x.stride(1), x.stride(2))


class Launch(NamedTuple):
    """A launch that was noted down instead of made."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """Tensors, numbers, None, and tuples of these, in the order of the kernel's parameters."""

    options: dict[str, Any]
    """Compile-time parameters by name."""

    warps: int
    stages: int


LATEST = 90
"""The compute capability that kernels are sized for where no GPU is."""

_noted: list[Launch] | None = None
_noted_for = LATEST


@contextmanager
def noting(capability: int = LATEST) -> Iterator[list[Launch]]:
    """Note launches down instead of making them: what would run, on a machine that cannot run it."""
    global _noted, _noted_for
    launches: list[Launch] = []
    _noted, _noted_for = launches, capability
    try:
        yield launches
    finally:
        _noted = None


def is_noting() -> bool:
    """Whether launches are noted down."""
    return _noted is not None


def capability_of(device: torch.device) -> int:
    """The compute capability of the GPU that launches with tensors of `device` are for: 90 is 9.0."""
    if _noted is not None or device.type != "cuda":
        return _noted_for if _noted is not None else LATEST
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **options: Any
) -> None:
    """Start `kernel` on the device of its first tensor."""
    if _noted is not None:
        _noted.append(Launch(kernel, grid, arguments, options, warps, stages))
        return
    device = next(_tensors(arguments)).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, num_warps=warps, num_stages=stages)


def _tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among arguments and tuples of them."""
    for given in arguments:
        if isinstance(given, Tensor):
            yield given
        elif isinstance(given, tuple):
            yield from _tensors(given)


def runs_on(device: torch.device) -> bool:
    """Whether kernels take tensors of `device`."""
    return device.type == "cuda" or INTERPRETED.value or _noted is not None
