"""What the launches of FLuRKA's kernels have in common: sizes, tiles, and the room for what they write."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.kernel_attention.launches import FEATURES_AT_ONCE
from megakernel.ops.kernels import states
from megakernel.ops.kernels.features import Phi, padded, phi_of, split_matrix
from megakernel.ops.kernels.launch import Tile, launch, rows_together, segment_length

TILES: dict[tuple[int, int], Tile] = {
    (2, 64): Tile(32, 64, 4),
    (2, 128): Tile(32, 64, 8),
    (2, 256): Tile(32, 32, 8),
    (4, 64): Tile(32, 32, 4),
}
"""(bytes of a number, padded features up to this) -> what programs that carry a state hold.

The largest tiles with which nothing goes to local memory on sm_80 or sm_90, in 16 bits: `python -m
benchmarks.kernel_resources`.
"""

EXCEPTIONS: dict[tuple[str, int, int], Tile] = {
    ("pool", 2, 256): Tile(32, 64, 8),
    ("write_queries", 2, 256): Tile(32, 64, 8),
    ("pull_landmarks", 2, 128): Tile(32, 32, 8),
    ("read", 2, 256): Tile(16, 16, 8),
    ("pull_queries", 2, 256): Tile(16, 16, 8),
    ("pull_landmarks", 2, 256): Tile(16, 32, 8),
}
"""(kernel, bytes of a number, padded features up to this) -> what programs of kernels with more or less to hold do."""

COLUMNS_AT_ONCE = {
    ("read", 128, 64): 16,
    ("read", 128, 128): 64,
    ("read", 256, 128): 16,
    ("pull_queries", 256, 128): 64,
}
"""(kernel, padded features, padded width) -> columns of a projection that it multiplies with at a time, if not 32."""

KERNEL_WINDOW_COLUMNS = {**COLUMNS_AT_ONCE, ("read", 256, 128): 64}
"""The same beside a window under phi."""

WINDOW_TILES: dict[int, Tile] = {
    128: Tile(64, 0, 4),
    256: Tile(32, 0, 4),
    512: Tile(32, 0, 8),
}
"""Bytes of the widest row that a window compares or adds up -> what programs that carry nothing hold."""

WINDOW_EXCEPTIONS: dict[tuple[str, str, int], Tile] = {
    ("pull_keys", "softmax", 128): Tile(32, 0, 4),
    ("pull_keys", "kernel", 128): Tile(32, 0, 4),
    ("pull_keys", "kernel", 256): Tile(16, 0, 4),
}
"""(kernel, near, bytes likewise) -> what programs of one with more to hold do."""

ANGLES = 256
"""Places beside a window for which there are angles: a tile of queries and one of keys."""


def segment_chunks(phi: Phi, q: Tensor, v: Tensor, block_size: int) -> int:
    """Chunks of a segment."""
    return max(1, segment_length(phi, q, v, block_size) // block_size)


class Shape(NamedTuple):
    """The arguments of an op that are no tensors."""

    feature_map: str
    components: int
    near: str
    blocks: int
    start: int
    before: int
    oldest: int


class Call(NamedTuple):
    """What all launches of a call share."""

    shape: Shape
    phi: Phi
    batch: int
    heads: int
    """Of keys."""

    group: int
    """Queries of a key."""

    length: int
    block_size: int
    rank: int
    values: int
    bytes: int
    segment: int
    """Chunks of a segment."""

    options: dict[str, Any]
    """Compile-time arguments that do not depend on tiles; each kernel takes those that it knows."""

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        pool_keys: Tensor,
        gate: Tensor | None,
        table: Tensor | None,
        starts: Tensor | None,
        windows: Tensor | None,
        shape: Shape,
    ) -> "Call":
        """The call with these arguments; k and v begin with `before` tokens of the tail."""
        rank, block_size = pool_keys.shape[-2:]
        width, values = q.shape[-1], v.shape[-1]
        rows = None if matrix is None else matrix.shape[-2]
        phi = phi_of(FeatureMap(shape.feature_map, shape.components), width, rows)
        options = {
            "CHUNKS": segment_chunks(phi, q, v, block_size),
            "B": block_size,
            "BP": padded(block_size),
            "BLOCKS": shape.blocks,
            "R": rank,
            "RP": padded(rank),
            "ALIGNED": windows is None,
            "V": values,
            "VP": padded(values),
            "PACKED": starts is not None,
            "G": q.shape[1] // k.shape[1] if q.shape[2] else 0,
            "GATED": gate is not None,
            "SOFTMAX": shape.near == "softmax",
            "SHARP": width**-0.5 / math.log(2),
            "ROTARY": table is not None,
            "H": triton.cdiv(width, 2),
            "DH": padded(triton.cdiv(width, 2)),
            # Where the output is a quotient of sums that have phi(q) as a factor.
            "QUOTIENT": gate is not None or shape.near == "kernel",
            "D": width,
            "DP": phi.padded_width,
            "PHI": phi,
        }
        return Call(
            shape,
            phi,
            k.shape[0],
            k.shape[1],
            q.shape[1] // k.shape[1],
            k.shape[2] - shape.before,
            block_size,
            rank,
            values,
            q.element_size(),
            options["CHUNKS"],
            options,
        )

    @property
    def chunks(self) -> int:
        """Of a row."""
        return triton.cdiv(self.length, self.block_size)

    @property
    def segments(self) -> int:
        """Of a row."""
        return triton.cdiv(self.chunks, self.segment)

    def tile(self, kernel: str) -> Tile:
        """What programs of a kernel that carries a state hold."""
        bound = max(64, self.phi.padded_features)
        tile = EXCEPTIONS.get((kernel, self.bytes, bound), TILES[self.bytes, bound])
        chunk, values = min(tile.chunk, padded(self.block_size)), min(tile.values, padded(self.values))
        return tile._replace(chunk=chunk, values=values)

    def window_tile(self, kernel: str) -> Tile:
        """What programs of a kernel that carries nothing hold."""
        width = max(self.phi.padded_width, padded(self.values))
        if self.shape.near == "kernel":
            width = max(width, self.phi.padded_features)
        bound = next((most for most in WINDOW_TILES if width * self.bytes <= most), max(WINDOW_TILES))
        tile = WINDOW_EXCEPTIONS.get((kernel, self.shape.near, bound), WINDOW_TILES[bound])
        return tile._replace(chunk=min(tile.chunk, padded(self.block_size)))

    def blocks(self, kernel: str) -> int:
        """Programs of this kernel beside each other for all columns of values."""
        return padded(self.values) // self.tile(kernel).values

    def carry(self, kernel: Any, *arguments: Any, whole_rows: bool = False, **options: Any) -> None:
        """Start a kernel that goes through segments: a program for each of a key head, and block of values.

        whole_rows: programs hold whole rows of values.
        """
        name = kernel.__name__
        tile = self.tile(name)
        sizes = self.phi.padded_features, self.phi.padded_width
        most = KERNEL_WINDOW_COLUMNS if self.shape.near == "kernel" else COLUMNS_AT_ONCE
        options["PHI"] = self.phi._replace(at_once=most.get((name, *sizes), self.phi.at_once))
        self._start(
            kernel,
            (self.batch * self.heads * self.segments, 1 if whole_rows else self.blocks(name)),
            arguments,
            tile,
            {"C": tile.chunk, "BK": tile.chunk, "BV": tile.values, **options},
        )

    def each(self, kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel that carries nothing."""
        tile = self.window_tile(kernel.__name__)
        self._start(kernel, (programs,), arguments, tile, {"C": tile.chunk, "BK": tile.chunk, **options})

    def _start(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple, tile: Tile, options: dict[str, Any]
    ) -> None:
        known = {
            name: value for name, value in {**self.options, **options}.items() if name in kernel.arg_names
        }
        launch(kernel, grid, *arguments, warps=tile.warps, stages=tile.stages, **known)

    def empty_states(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the states of every segment and the last one: sums, normalizers and log scales."""
        lead = (self.batch, self.heads, self.segments + 1)
        size = self.phi.padded_features
        sums = like.new_empty(*lead, size, padded(self.values), dtype=torch.float32)
        return sums, sums.new_empty(*lead, size), sums.new_empty(lead)

    def empty_marks(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for landmarks E K, their features and log scales, and F V."""
        lead = (self.batch, self.heads, self.chunks, self.rank)
        marks = like.new_empty(*lead, self.phi.width, dtype=torch.float32)
        features = like.new_empty(*lead, self.phi.features)
        scaled = lead if self.phi.unbounded else (0,)
        return marks, features, marks.new_empty(scaled), marks.new_empty(*lead, self.values)

    def empty_parts(self, kernel: str, tokens: Tensor, width: int, more: bool) -> Tensor:
        """Room for rows of gradients (parts, B, H, N, width), a part for each block of values of a kernel.

        more: something else is added, to the one part that there is, or as another part.
        """
        blocks = self.blocks(kernel)
        dtype = torch.float32 if blocks > 1 else tokens.dtype
        return tokens.new_empty(blocks + (more and blocks > 1), *tokens.shape[:3], width, dtype=dtype)

    def pass_on(
        self,
        room: tuple[Tensor, Tensor, Tensor],
        first: tuple[Tensor | None, Tensor | None, Tensor | None],
        starts: Tensor | None,
        *,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states that enter each segment, from what each segment adds."""
        sums, norms, added = room
        entering, logs = torch.empty_like(norms), torch.empty_like(added)
        features, values = sums.shape[-2:]
        entered = [unused if given is None else given for given, unused in zip(first, room)]
        launch(
            states.pass_states,
            (self.batch * self.heads, triton.cdiv(features, FEATURES_AT_ONCE)),
            *(sums, norms, added, entering, logs, *entered, added if starts is None else starts),
            *(self.length, self.shape.start, self.heads, self.segments),
            warps=4,
            SEGMENT=self.segment * self.block_size,
            FP=features,
            VP=values,
            BF=FEATURES_AT_ONCE,
            PACKED=starts is not None,
            FIRST=first[0] is not None,
            REVERSE=reverse,
            CAUSAL=True,
            UNBOUNDED=self.phi.unbounded,
        )
        return sums, entering, logs


class Inputs(NamedTuple):
    """The tensors of a call as kernels take them; an empty one stands in place of those that are not there."""

    q: Tensor
    k: Tensor
    v: Tensor
    matrix: Tensor
    wide_matrix: Tensor
    low: int
    """The distance between the two terms of the matrix (`split_matrix`)."""

    pool_keys: Tensor
    pool_values: Tensor
    pool_head: int
    """The distance between the pools of two heads."""

    mass: Tensor
    gate: Tensor
    far_weight: Tensor
    table: Tensor
    starts: Tensor
    windows: Tensor
    ends: Tensor

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        pool_keys: Tensor,
        pool_values: Tensor,
        mass: Tensor,
        gate: Tensor | None,
        far_weight: Tensor,
        *tables: Tensor | None,
    ) -> "Inputs":
        """Those of the op, tables being angles, starts, windows and ends."""
        q, k, v = rows_together(q), rows_together(k), rows_together(v)
        heads = k.shape[1]
        terms, whole = split_matrix(matrix, heads, q.dtype), split_matrix(matrix, heads, torch.float32)
        nothing = q.new_empty(0)
        return Inputs(
            q,
            k,
            v,
            nothing if terms is None else terms,
            nothing if whole is None else whole,
            0 if terms is None else terms.stride(0),
            pool_keys.contiguous(),
            pool_values.contiguous(),
            pool_keys[0].numel() if pool_keys.dim() == 3 else 0,
            mass.contiguous(),
            nothing if gate is None else gate.contiguous(),
            far_weight.contiguous(),
            *(nothing if given is None else given.contiguous() for given in tables),
        )
