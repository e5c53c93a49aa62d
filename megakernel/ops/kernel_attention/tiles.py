"""Segments and tile sizes of kernel attention's kernels, which also process FLuRKA's landmarks."""

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor

from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES
from megakernel.ops.kernels.feature_maps import Phi
from megakernel.ops.kernels.launch import MIN_PROGRAMS
from megakernel.ops.kernels.launcher import SHAPES_REMEMBERED, TileSizes
from megakernel.ops.kernels.primitives import cdiv, padded, power_of_two

MIN_SEGMENT = 64
"""Tokens of the shortest segment of bidirectional sequences, of which every segment is a multiple."""

STATE_SHARE = 0.02
"""Bytes of states of long bidirectional sequences, at most, as a share of the bytes of q, k, v and out."""

SEGMENT = 128
"""Tokens per segment of causal sequences with up to 64 features; longer in proportion with more features. States then
take at most a quarter of the bytes of q, k, v and out, and a segment's pairs cost about as much as its state."""

KERNELS = ("write_keys", "read", "bwd_dq", "write_queries", "bwd_dkv")

TILES: dict[tuple[int, int], TileSizes] = {
    (2, 64): TileSizes(64, 64, 4),
    (2, 128): TileSizes(64, 32, 4),
    (2, 256): TileSizes(64, 32, 4),
    (4, 64): TileSizes(32, 32, 4),
    (4, 128): TileSizes(16, 16, 4),
}
"""(bytes per element, largest padded features) -> tile sizes, for GPUs where four warps multiply tiles of 64 rows."""

EXCEPTIONS: dict[tuple[str, int, int], TileSizes] = {
    ("write_keys", 2, 128): TileSizes(64, 64, 4, 2),
    ("read", 2, 128): TileSizes(64, 64, 4, 2),
    ("read", 2, 256): TileSizes(64, 64, 4),
    ("bwd_dq", 2, 128): TileSizes(64, 32, 4, 2),
    ("bwd_dq", 2, 256): TileSizes(64, 64, 4, 2),
    ("bwd_dq", 4, 64): TileSizes(16, 16, 4),
    ("write_queries", 2, 128): TileSizes(64, 64, 4, 3),
    ("bwd_dkv", 2, 128): TileSizes(64, 32, 4, 2),
    ("bwd_dkv", 2, 256): TileSizes(64, 64, 4),
}
"""(kernel, bytes per element, largest padded features) -> tile sizes of kernels that deviate from TILES.

Those of two bytes were chosen by time on an H200, for all maps that were measured together: another one is up to 10 %
faster for some map (benchmarks/results/kernel_tiles.md).
"""

UNBOUNDED_EXCEPTIONS = EXCEPTIONS | {("bwd_dkv", 2, 128): TileSizes(64, 32, 4)}
"""The same for unbounded maps: there, a second stage of `bwd_dkv` spills (0.62 ms instead of 0.38)."""

SMALL_TILES: dict[tuple[int, int], TileSizes] = {
    (2, 64): TileSizes(64, 32, 4),
    (2, 128): TileSizes(64, 32, 8),
    (2, 256): TileSizes(64, 32, 8),
}
"""TILES for GPUs whose tensor cores read operands from registers, and which have less shared memory."""

SMALL_EXCEPTIONS: dict[tuple[str, int, int], TileSizes] = {
    ("bwd_dq", 2, 128): TileSizes(32, 32, 8),
    ("write_queries", 2, 256): TileSizes(16, 16, 8),
}
"""Tile sizes of kernels that would spill too much with SMALL_TILES."""


@lru_cache(SHAPES_REMEMBERED)
def tile_sizes(phi: Phi, itemsize: int, capability: int) -> Mapping[str, TileSizes]:
    """Kernel -> its tile sizes, for elements of `itemsize` bytes."""
    bound = max(64, phi.padded_features)
    exceptions, tiles = SMALL_EXCEPTIONS, SMALL_TILES
    if capability in WGMMA_CAPABILITIES or itemsize == 4:
        exceptions, tiles = UNBOUNDED_EXCEPTIONS if phi.unbounded else EXCEPTIONS, TILES
    return {name: exceptions.get((name, itemsize, bound)) or tiles[itemsize, bound] for name in KERNELS}


def segment_length(phi: Phi, q: Tensor, v: Tensor, causal: bool) -> int:
    """Tokens per segment, MIN_SEGMENT times a power of two; depends on shapes alone.

    Bidirectional attention computes no pairs, so segments only split the work. They are long enough that states take at
    most STATE_SHARE of the memory of q, k, v and out, or shorter if a small batch would give fewer than MIN_PROGRAMS
    programs. The longer of keys and queries decides: both have states in backward.
    """
    if causal:
        return SEGMENT * max(1, phi.padded_features // 64)
    batch, heads, queries, width = q.shape
    key_heads, keys, values = v.shape[1:]
    token = (heads + key_heads) * (width + values) * v.element_size()
    state = key_heads * phi.padded_features * (padded(values) + 1) * 4
    for_memory = power_of_two(cdiv(int(state / STATE_SHARE), token))
    for_programs = power_of_two(max(1, batch * key_heads * max(queries, keys) // MIN_PROGRAMS))
    return max(MIN_SEGMENT, min(for_memory, max(for_programs, 4 * MIN_SEGMENT)))
