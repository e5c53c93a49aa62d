"""Sizes, buffers and launches of one call of an op whose states are scanned over segments."""

from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megakernel.ops.feature_maps import Map
from megakernel.ops.kernels import states
from megakernel.ops.kernels.arguments import SequenceInfo, State, Tiling
from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES
from megakernel.ops.kernels.feature_maps import Phi, phi_of
from megakernel.ops.kernels.launch import capability_of, fits_rows, launch
from megakernel.ops.kernels.primitives import cdiv, padded

FEATURES_AT_ONCE = 8
"""Feature rows of a state per program of `pass_states`."""

STATES_IN_FLIGHT = 6
"""Segments whose states `pass_states` reads from memory at once."""

SHAPES_REMEMBERED = 1024
"""Entries of caches of sizes that depend on shapes alone, of which evaluation of many lengths makes new ones."""


class TileSizes(NamedTuple):
    """Tile sizes of one program of a kernel."""

    chunk: int
    """Rows of the tile that it accumulates."""

    block: int
    """Rows per step of its inner loop."""

    warps: int
    stages: int = 1
    """Pipeline stages: blocks in flight from memory at once."""


class Grid(Enum):
    """What the programs of a kernel run over."""

    QUERY_TILES = "tiles of queries, for each query head"
    QUERY_SEGMENTS = "segments of queries, for each key head"
    KEY_TILES = "tiles of keys, for each key head"
    KEY_SEGMENTS = "segments of keys, for each key head"


class MapOptions(Protocol):
    """The options of every op that name its feature map."""

    @property
    def feature_map(self) -> str:
        """Its name."""

    @property
    def components(self) -> int:
        """Gaussians of its mixture, else 1."""


def map_of_call(options: MapOptions, q: Tensor, projection: Tensor | None, decays: bool) -> Phi:
    """The feature map of a call on queries q with a projection (..., M, d). decays: whether its states decay."""
    rows = None if projection is None else projection.shape[-2]
    has_wgmma = capability_of(q.device) in WGMMA_CAPABILITIES and q.element_size() == 2
    return _map_of(options.feature_map, options.components, q.shape[-1], rows, decays, has_wgmma)


@lru_cache(SHAPES_REMEMBERED)
def _map_of(name: str, components: int, width: int, rows: int | None, decays: bool, has_wgmma: bool) -> Phi:
    phi = phi_of(Map(name, components), width, rows, decays)
    # Rows of 128 bytes, the layout of operands that wgmma reads fastest.
    return phi._replace(max_block_d=64) if has_wgmma else phi


def output_buffer(q: Tensor, v: Tensor) -> Tensor:
    """A buffer (B, H, N, D) for outputs, in memory (N, B, H, D): output projections read it without a copy.

    If the rows of so many sequences would be too far apart, it is in memory as in shape: `Rows` of a copy would not
    reach the buffer.
    """
    batch, heads, length, _ = q.shape
    size = (batch, heads, length, v.shape[-1])
    order = (2, 0, 1, 3) if fits_rows(batch * heads * v.shape[-1]) else (0, 1, 2, 3)
    return torch.empty_permuted(size, order, dtype=v.dtype, device=v.device)


class LaunchPlan(NamedTuple):
    """How a kernel is launched."""

    programs: int
    tiling: Tiling
    warps: int
    stages: int


class Launcher(NamedTuple):
    """Sizes of one call of an op; allocates its buffers and launches its kernels."""

    phi: Phi
    seq: SequenceInfo
    """Without the tables of document starts and landmarks, and without decays."""

    segment: int
    """Tokens per segment."""

    group: int
    values: int
    keys: int
    """Mixture keys per position; 0 without mixtures."""

    causal: bool
    dtype: torch.dtype
    capability: int
    tiles: tuple[tuple[str, TileSizes], ...]
    """Kernels and their tile sizes."""

    block_size: int = 1
    rank: int = 0
    """Landmarks per block, see `Tiling`."""

    @property
    def stores_features(self) -> bool:
        """Whether features are stored in memory."""
        return self.phi.projected or self.phi.decays or self.keys > 0

    def feature_buffers(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Buffers for the features of tokens (B, H, N, d) and for their log scales; None if not stored."""
        if not self.stores_features:
            return None, None
        lead = tokens.shape[:3]
        logs = tokens.new_empty(lead, dtype=torch.float32) if self.phi.unbounded else None
        return tokens.new_empty(*lead, self.phi.padded_features), logs

    def tile_sizes(self, kernel: str) -> TileSizes:
        """Tile sizes of the kernel with this name, no longer than a segment."""
        tile, most = dict(self.tiles)[kernel], padded(self.segment)
        return tile._replace(chunk=min(tile.chunk, most), block=min(tile.block, most))

    def launch(self, kernel: Any, batch: int, *arguments: Any, grid: Grid | int, **options: Any) -> None:
        """Launch a kernel on a grid, or with that number of programs."""
        programs, tiling, warps, stages = plan(self, kernel.__name__, batch, grid)
        options |= {"TILING": tiling, "PHI": self.phi}
        if programs:
            launch(kernel, (programs,), *arguments, warps=warps, stages=stages, **options)

    def state_buffer(self, like: Tensor, entries: int, dtype: torch.dtype = torch.float32) -> State:
        """A buffer for `entries` states per key head; -1: a single one, without that dimension."""
        lead = (like.shape[0], self.seq.heads, *[entries] * (entries >= 0))
        size = self.phi.padded_features
        sums = like.new_empty(*lead, size, padded(self.values), dtype=dtype)
        return State(
            sums, like.new_empty(*lead, size, dtype=torch.float32), like.new_empty(lead, dtype=torch.float32)
        )

    def segment_buffer(self, like: Tensor, length: int, of_queries: bool = False) -> State:
        """A buffer for the sums of each segment, later overwritten with the states that enter segments.

        If one key has nearly all the weight of its queries, its gradient is a small difference of large terms of the
        state of queries. Unbounded maps make this likely, so their states of queries stay in float32.
        """
        is_exact = self.dtype != torch.bfloat16 or (of_queries and self.phi.unbounded)
        dtype = torch.float32 if is_exact else torch.bfloat16
        return self.state_buffer(like, cdiv(length, self.segment), dtype)

    def pass_states(
        self,
        buffer: State,
        first: State | None,
        seq: SequenceInfo,
        length: int,
        *,
        reverse: bool,
        keep: bool = True,
        entered: State | None = None,
    ) -> tuple[State, State, Tensor | None]:
        """Scan the sums of segments in `buffer` into the states that enter each segment, and the last state.

        Without `keep`, only the last state is computed, and `buffer` is unchanged. In reverse, given the states that
        `entered` segments from the left, also returns the gradients of their log scales, (B, H_kv, segments).
        """
        entering = State(buffer.sums, torch.empty_like(buffer.norms), torch.empty_like(buffer.logs))
        saved = entering[1:] if keep and self.causal else (None, None)
        last = self.state_buffer(buffer.norms, -1)
        batch, heads, segments = buffer.logs.shape
        programs = cdiv(self.phi.padded_features, FEATURES_AT_ONCE)
        scale_grads = None if entered is None else buffer.logs.new_empty(batch, heads, programs, segments)
        launch(
            states.pass_states,
            (batch * heads, programs),
            *(buffer, *saved, first, last, seq.starts, None if seq.decay is None else seq.decay.of_segments),
            *(entered, scale_grads),
            # No document starts inside a bidirectional sequence.
            *(length, seq.start if self.causal else -1, seq.heads, segments),
            warps=4,
            SEGMENT=self.segment,
            FP=self.phi.padded_features,
            VP=padded(self.values),
            BF=FEATURES_AT_ONCE,
            STAGES=STATES_IN_FLIGHT,
            REVERSE=reverse,
            UNBOUNDED=self.phi.unbounded,
        )
        return entering, last, None if scale_grads is None else scale_grads.sum(2)


@lru_cache(SHAPES_REMEMBERED)
def plan(launcher: Launcher, kernel: str, batch: int, grid: Grid | int) -> LaunchPlan:
    """Programs and sizes of a kernel: one program per tile of queries or keys, or one per segment."""
    tile, seq, segment, group = launcher.tile_sizes(kernel), launcher.seq, launcher.segment, launcher.group
    tiling = Tiling(
        *(segment, tile.chunk, tile.block, group, launcher.values, padded(launcher.values)),
        *(launcher.keys, launcher.causal, launcher.block_size, launcher.rank),
    )
    if isinstance(grid, int):
        return LaunchPlan(grid, tiling, tile.warps, tile.stages)
    over_keys = grid in (Grid.KEY_TILES, Grid.KEY_SEGMENTS)
    length, span = (seq.keys, tiling.span) if over_keys else (seq.queries, segment)
    if grid in (Grid.QUERY_SEGMENTS, Grid.KEY_SEGMENTS):
        programs = cdiv(length, span)
    else:
        whole, rest = divmod(length, span)
        programs = whole * cdiv(span, tile.chunk) + cdiv(rest, tile.chunk)
    heads = batch * seq.heads * (group if grid is Grid.QUERY_TILES else 1)
    return LaunchPlan(heads * programs, tiling, tile.warps, tile.stages)
