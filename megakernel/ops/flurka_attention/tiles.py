"""Segments and tile sizes of FLuRKA's kernels."""

from collections.abc import Mapping
from functools import lru_cache

from megakernel.ops.flurka_attention.arguments import NearParams
from megakernel.ops.kernel_attention import tiles
from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES
from megakernel.ops.kernels.feature_maps import Phi
from megakernel.ops.kernels.launcher import SHAPES_REMEMBERED, TileSizes
from megakernel.ops.kernels.primitives import cdiv, padded

MIN_LANDMARKS = 64
"""Fewest landmarks per segment: fewer would not fill matrix products of tiles."""

QUERIES_AHEAD = 2**17
"""Queries, counted over sequences and heads, whose windows are computed while states are exchanged. An exchange takes
as long for shards of any length, but what is computed ahead goes through memory: 8 bytes per element of the output."""


def queries_ahead(batch: int, heads: int, length: int, segment: int) -> int:
    """The queries of each sequence that are computed ahead: whole segments, so that no tile is split, or all."""
    return min(length, cdiv(cdiv(QUERIES_AHEAD, batch * heads), segment) * segment)


def segment_blocks(phi: Phi, block_size: int, rank: int) -> int:
    """Blocks per segment: at least as many tokens as in kernel attention, and at least MIN_LANDMARKS landmarks."""
    tokens = tiles.SEGMENT * max(1, phi.padded_features // 64)
    return max(cdiv(tokens, block_size), cdiv(MIN_LANDMARKS, rank))


@lru_cache(SHAPES_REMEMBERED)
def tile_sizes(
    phi: Phi, near: NearParams, size: int, values: int, capability: int
) -> Mapping[str, TileSizes]:
    """Kernel -> its tile sizes, for elements of `size` bytes; those of kernel attention unless FLuRKA has its own."""
    sizes = _tile_sizes(phi, near, size, values, capability)
    # These take over tiles of others.
    others = {"window_forward": sizes["merge"], "window_dq": sizes["merge_backward"]}
    of_outputs = dict.fromkeys(("merge_outputs", "merge_outputs_backward"), TileSizes(32, 32, 4))
    return {**sizes, **others, **of_outputs, "pool_gradients": sizes["pool"]}


def _tile_sizes(
    phi: Phi, near: NearParams, size: int, values: int, capability: int
) -> Mapping[str, TileSizes]:
    sizes = {**tiles.tile_sizes(phi, size, capability)}
    sizes |= dict.fromkeys(("pool", "pool_backward"), TileSizes(16, 16, 4))
    has_wgmma = capability in WGMMA_CAPABILITIES
    if size == 4:
        names = ("merge", "merge_backward", "window_backward", "write_keys", "bwd_dkv")
        return sizes | dict.fromkeys(names, TileSizes(32, 32, 4))
    if max(phi.padded_width, padded(values), phi.padded_features // 2) <= 64:
        window = TileSizes(64, 64, 4, 2 if has_wgmma else 1) if near.softmax else TileSizes(64, 32, 4)
        return sizes | {
            **dict.fromkeys(("merge", "merge_backward", "write_keys"), TileSizes(64, 64, 4)),
            "window_backward": window,
            "bwd_dkv": TileSizes(64, 32, 4, 3 if has_wgmma else 1),
        }
    sizes |= {"write_keys": TileSizes(64, 64, 4), "bwd_dkv": TileSizes(64, 32, 4 if has_wgmma else 8)}
    if phi.unbounded and not has_wgmma:
        sizes["bwd_dkv"] = TileSizes(32, 32, 8)
    of_queries = ("merge", "merge_backward", "window_backward")
    if has_wgmma and near.softmax:
        return sizes | dict.fromkeys(of_queries, TileSizes(64, 32, 4))
    sizes |= dict.fromkeys(of_queries, TileSizes(32, 32, 8))
    return sizes | {"window_backward": TileSizes(64, 32, 8)} if near.softmax else sizes
