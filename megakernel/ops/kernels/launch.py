"""How kernels over segments are launched: fixed tables of shapes, nothing that is tried out at run time."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from megakernel.ops.kernels.features import Phi, padded

PROGRAMS = 512
"""Programs that a launch should have at least: four on each processor of the largest chips."""

STATE_SHARE = 0.02
"""Share of the bytes of q, k, v and out that states may take on long rows."""


class Tiles(NamedTuple):
    """The sizes of a launch."""

    chunk: int
    """C, tokens whose pairs are weighed one by one."""

    segment: int
    """Tokens between two states in memory, a multiple of the chunk."""

    segments: int
    """Of a row."""

    values: int
    """BV, columns of values of one program."""

    blocks: int
    """Programs beside each other for all columns."""

    warps: int


def tiles(phi: Phi, q: Tensor, v: Tensor) -> Tiles:
    """Sizes for queries (B, H, N, d) and values (B, H_kv, N, D)."""
    length = v.shape[2]
    # Half a register file of float32 for the state; the tiles of tokens take the rest.
    width = padded(v.shape[-1])
    columns = max(16, min(width, 128 * 128 // phi.padded_features))
    chunk = 64 if v.element_size() == 2 else 32
    segment = segment_length(phi, q, v, chunk)
    blocks = triton.cdiv(v.shape[-1], columns)
    warps = 8 if phi.padded_features * columns > 8192 else 4
    return Tiles(chunk, segment, triton.cdiv(length, segment), columns, blocks, warps)


def segment_length(phi: Phi, q: Tensor, v: Tensor, chunk: int) -> int:
    """Tokens of a segment, a power of two of chunks.

    Long enough that states take STATE_SHARE of the memory of q, k, v and out; where the batch is so small that this
    leaves fewer than PROGRAMS segments, as short as gives that many. Depends on shapes alone.
    """
    batch, heads, length, width = q.shape
    key_heads, values = v.shape[1], v.shape[-1]
    token = ((heads + key_heads) * width + (heads + key_heads) * values) * v.element_size()
    state = key_heads * phi.padded_features * (padded(values) + 1) * 4
    frugal = triton.next_power_of_2(triton.cdiv(int(state / STATE_SHARE), token))
    parallel = triton.next_power_of_2(max(1, batch * key_heads * length // PROGRAMS))
    return max(chunk, min(frugal, max(parallel, 4 * chunk)))


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and token of (B, H, N, width) with unit stride along the width."""
    return x.stride(0), x.stride(1), x.stride(2)


def rows_together(x: Tensor) -> Tensor:
    """`x` with unit stride along its last dimension, copied only where it has not."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Launch(NamedTuple):
    """A launch that was noted down instead of made."""

    kernel: Any
    arguments: tuple[Any, ...]
    """Tensors and numbers, in the order of the kernel's parameters."""

    options: dict[str, Any]
    """Compile-time parameters by name."""

    warps: int
    stages: int


_noted: list[Launch] | None = None


@contextmanager
def noting() -> Iterator[list[Launch]]:
    """Note launches down instead of making them: what would run, on a machine that cannot run it."""
    global _noted
    _noted = launches = []
    try:
        yield launches
    finally:
        _noted = None


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 2, **options: Any
) -> None:
    """Start `kernel` on the device of its first argument."""
    if _noted is not None:
        _noted.append(Launch(kernel, arguments, options, warps, stages))
        return
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, num_warps=warps, num_stages=stages)


def runs_on(device: torch.device) -> bool:
    """Whether kernels take tensors of `device`."""
    return device.type == "cuda" or knobs.runtime.interpret or _noted is not None
