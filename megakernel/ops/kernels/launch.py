"""How kernels over segments are launched: fixed tables of shapes, nothing that is tried out at run time."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megakernel.ops.kernels.features import INTERPRETED, Phi, padded

PROGRAMS = 512
"""Programs that a launch should have at least: four on each processor of the largest chips."""

STATE_SHARE = 0.02
"""Share of the bytes of q, k, v and out that states may take on long rows."""


LONGEST_CHUNK = 64
"""Tokens of the longest chunk, which segments are multiples of."""


FARTHEST = 2**20
"""Numbers between two rows of a tensor that kernels take as it is: tiles of 1,024 rows or fewer count in 32 bits."""


class Tile(NamedTuple):
    """What one program of a kernel holds."""

    chunk: int
    """C, tokens whose pairs are weighed one by one."""

    values: int
    """BV, columns of values."""

    warps: int

    stages: int = 1
    """Chunks that are on their way from memory at once; more than one takes registers for its places."""


TILES: dict[tuple[int, int], Tile] = {
    (2, 64): Tile(32, 64, 4),
    (2, 128): Tile(32, 64, 8),
    (2, 256): Tile(32, 32, 8),
    (4, 64): Tile(32, 32, 4),
    (4, 128): Tile(16, 16, 8),
}
"""(bytes of a number, padded features up to this) -> what programs hold.

The largest tiles with which nothing goes to local memory on sm_80 or sm_90: `python -m benchmarks.kernel_resources`.
"""

EXCEPTIONS: dict[tuple[str, int, int], Tile] = {
    ("write_keys", 2, 64): Tile(64, 64, 4),
    ("write_queries", 2, 64): Tile(64, 64, 4),
    ("read", 4, 64): Tile(16, 32, 8),
    ("pull_values", 4, 64): Tile(16, 32, 4),
    ("pull_keys", 4, 64): Tile(16, 32, 4),
    ("pull_queries", 2, 64): Tile(16, 64, 4),
    ("pull_queries", 4, 64): Tile(16, 32, 4),
    ("pull_queries", 2, 128): Tile(16, 32, 8),
    ("pull_keys", 2, 128): Tile(16, 32, 8),
    ("pull_queries", 2, 256): Tile(16, 32, 8),
    ("pull_keys", 2, 256): Tile(16, 32, 8),
    ("pull_values", 2, 256): Tile(16, 32, 8),
}
"""(kernel, bytes of a number, padded features up to this) -> what programs of kernels with more or less to hold do."""

SPECIAL: dict[tuple[str, int, int, bool, bool], Tile] = {
    ("pull_queries", 2, 128, False, False): Tile(16, 128, 8),
    ("pull_queries", 2, 128, False, True): Tile(16, 64, 8),
    ("pull_keys", 2, 128, False, False): Tile(16, 128, 8),
    ("pull_keys", 2, 128, False, True): Tile(16, 128, 8),
    ("pull_values", 2, 128, True, True): Tile(16, 64, 8),
    ("read", 2, 256, True, True): Tile(16, 32, 8),
}
"""The same by whether the map has a projection, and whether a key has several queries: both take registers.

One block of values writes a gradient once, in the dtype of the tokens; several write a part each, in float32, and torch
adds these up: at d = 128 with four blocks that was two thirds of all bytes of forward and backward.
"""


class Tiles(NamedTuple):
    """How a call cuts its rows and values."""

    segment: int
    """Tokens between two states in memory, the same for all kernels of a call."""

    segments: int
    """Of a row."""

    features: int
    """Padded, of the feature map."""

    width: int
    """Padded columns of values."""

    bytes: int
    """Of a number in memory."""

    projected: bool
    """Whether the feature map has a projection."""

    grouped: bool
    """Whether a key has several queries."""

    def of(self, kernel: str) -> Tile:
        """What programs of the kernel of this name hold."""
        bound = max(64, self.features)
        size = kernel, self.bytes, bound
        tile = EXCEPTIONS.get(size, TILES[self.bytes, bound])
        tile = SPECIAL.get((*size, self.projected, self.grouped), tile)
        return tile._replace(values=min(tile.values, self.width))

    def blocks(self, kernel: str) -> int:
        """Programs of this kernel beside each other for all columns of values."""
        return self.width // self.of(kernel).values


def tiles(phi: Phi, q: Tensor, v: Tensor) -> Tiles:
    """Sizes for queries (B, H, N, d) and values (B, H_kv, N, D)."""
    segment = segment_length(phi, q, v, LONGEST_CHUNK)
    segments = triton.cdiv(v.shape[2], segment)
    sizes = (phi.padded_features, padded(v.shape[-1]), v.element_size())
    return Tiles(segment, segments, *sizes, phi.projected, q.shape[1] > v.shape[1])


def segment_length(phi: Phi, q: Tensor, v: Tensor, chunk: int) -> int:
    """Tokens of a segment, a power of two of chunks.

    Long enough that states take STATE_SHARE of the memory of q, k, v and out; where the batch is so small that this
    leaves fewer than PROGRAMS segments, as short as gives that many. Where keys are few and queries many, or the other
    way round, the longer rows decide: both keep states in backward. Depends on shapes alone.
    """
    batch, heads, queries, width = q.shape
    key_heads, keys, values = v.shape[1:]
    length = max(queries, keys)
    token = ((heads + key_heads) * width + (heads + key_heads) * values) * v.element_size()
    state = key_heads * phi.padded_features * (padded(values) + 1) * 4
    frugal = triton.next_power_of_2(triton.cdiv(int(state / STATE_SHARE), token))
    parallel = triton.next_power_of_2(max(1, batch * key_heads * length // PROGRAMS))
    return max(chunk, min(frugal, max(parallel, 4 * chunk)))


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and token of (B, H, N, width) with unit stride along the width."""
    return x.stride(0), x.stride(1), x.stride(2)


def rows_together(x: Tensor) -> Tensor:
    """`x` with unit stride along its last dimension and rows at most FARTHEST apart, copied only where it has not."""
    return x if x.stride(-1) == 1 and x.stride(-2) <= FARTHEST else x.contiguous()


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


_noted: list[Launch] | None = None


@contextmanager
def noting() -> Iterator[list[Launch]]:
    """Note launches down instead of making them: what would run, on a machine that cannot run it."""
    global _noted
    launches: list[Launch] = []
    _noted = launches
    try:
        yield launches
    finally:
        _noted = None


def is_noting() -> bool:
    """Whether launches are noted down."""
    return _noted is not None


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, stages: int = 1, **options: Any
) -> None:
    """Start `kernel` on the device of its first argument, or of the first tensor of a tuple."""
    if _noted is not None:
        _noted.append(Launch(kernel, grid, arguments, options, warps, stages))
        return
    first = arguments[0]
    device = (first if isinstance(first, torch.Tensor) else first[0]).device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, num_warps=warps, num_stages=stages)


def runs_on(device: torch.device) -> bool:
    """Whether kernels take tensors of `device`."""
    return device.type == "cuda" or INTERPRETED.value or _noted is not None
