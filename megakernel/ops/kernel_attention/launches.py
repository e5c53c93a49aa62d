"""Shared by all launches of kernel attention: tile sizes, buffers, and the scan over segment states."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import query_kernels
from megakernel.ops.kernel_attention.arguments import Queries, SequenceInfo, State, Tiling
from megakernel.ops.kernels import states
from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES
from megakernel.ops.kernels.features import Phi, cdiv, padded, phi_of, power_of_two
from megakernel.ops.kernels.launch import MIN_PROGRAMS, capability_of, fits_rows, launch
from megakernel.ops.state import EMPTY, KernelState

MIN_SEGMENT = 64
"""Tokens of the shortest segment of bidirectional sequences, of which every segment is a multiple."""

STATE_SHARE = 0.02
"""Bytes of states of long bidirectional sequences, at most, as a share of the bytes of q, k, v and out."""

FEATURES_AT_ONCE = 8
"""Feature rows of a state per program of `pass_states`."""

STATES_IN_FLIGHT = 6
"""Segments whose states `pass_states` reads from memory at once."""

SEGMENT = 128
"""Tokens per segment of causal sequences with up to 64 features; longer in proportion with more features. States then
take at most a quarter of the bytes of q, k, v and out, and a segment's pairs cost about as much as its state."""


class TileSizes(NamedTuple):
    """Tile sizes of one program of a kernel."""

    chunk: int
    """Rows of the tile that it accumulates."""

    block: int
    """Rows per step of its inner loop."""

    warps: int
    stages: int = 1
    """Pipeline stages: blocks in flight from memory at once."""


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

LARGE_SHARED_MEMORY = (80, 90, 100, 103)
"""Compute capabilities of GPUs with at least 163 KiB of shared memory per program; 86, 89 and 120 have 99 KiB."""


SHAPES_REMEMBERED = 1024
"""Entries of caches of sizes that depend on shapes alone, of which evaluation of many lengths makes new ones."""

MATRIX = 2
"""Index of the projection among an op's tensors of keys, after keys and values."""

DECAY = 3
"""Index of the log decays (B, H_kv, N) among the tensors of keys."""


def map_of_call(options: Sequence[Any], q: Tensor, keys: Tensors) -> Phi:
    """The feature map of a call. options: the name of the map, its components, and others."""
    matrix = keys[MATRIX]
    rows = None if matrix is None else matrix.shape[-2]
    has_wgmma = capability_of(q.device) in WGMMA_CAPABILITIES and q.element_size() == 2
    return _map_of(*options[:2], q.shape[-1], rows, keys[DECAY] is not None, has_wgmma)


@lru_cache(SHAPES_REMEMBERED)
def _map_of(name: str, components: int, width: int, rows: int | None, decays: bool, has_wgmma: bool) -> Phi:
    phi = phi_of(FeatureMap(name, components), width, rows, decays)
    # Rows of 128 bytes, the layout of operands that wgmma reads fastest.
    return phi._replace(max_block_d=64) if has_wgmma else phi


def pack_state(state: KernelState, phi: Phi, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A state in the kernels' padded layout: sums (B, H_kv, FP, VP), normalizers (B, H_kv, FP), log scales."""
    halves = phi.features // phi.rows
    lead = state.sums.unflatten(2, (halves, phi.rows)).to(torch.float32)
    whole = torch.nn.functional.pad(lead, (0, 0, 0, phi.padded_rows - phi.rows)).flatten(2, 3)
    sums = torch.nn.functional.pad(whole[..., :-1], (0, padded(value_dim) - value_dim))
    logs = state.log_scale.to(torch.float32)
    # For bounded maps only the empty state has a scale (EMPTY); kernels would merge window and landmarks by it.
    return (
        sums.contiguous(),
        whole[..., -1].contiguous(),
        logs.contiguous() if phi.unbounded else torch.zeros_like(logs),
    )


def unpack_state(sums: Tensor, norms: Tensor, logs: Tensor, phi: Phi, value_dim: int) -> KernelState:
    """The inverse of `pack_state`."""
    halves = phi.features // phi.rows
    whole = torch.cat([sums[..., :value_dim], norms[..., None]], -1)
    saved = whole.unflatten(2, (halves, phi.padded_rows))[:, :, :, : phi.rows].flatten(2, 3)
    return KernelState(saved, logs.detach())


def output_buffer(q: Tensor, v: Tensor) -> Tensor:
    """A buffer (B, H, N, D) for outputs, in memory (N, B, H, D): output projections read it without a copy.

    If the rows of so many sequences would be too far apart, it is in memory as in shape: `Rows` of a copy would not
    reach the buffer.
    """
    batch, heads, length, _ = q.shape
    size = (batch, heads, length, v.shape[-1])
    order = (2, 0, 1, 3) if fits_rows(batch * heads * v.shape[-1]) else (0, 1, 2, 3)
    return torch.empty_permuted(size, order, dtype=v.dtype, device=v.device)


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


class LaunchPlan(NamedTuple):
    """How a kernel is launched."""

    programs: int
    tiling: Tiling
    warps: int
    stages: int


class Launcher(NamedTuple):
    """Sizes and options of one call of an op; allocates its buffers and launches its kernels."""

    phi: Phi
    seq: SequenceInfo
    """Without the table of document starts."""

    segment: int
    """Tokens per segment."""

    group: int
    values: int
    keys: int
    """Mixture keys per position; 0 without mixtures."""

    causal: bool
    dtype: torch.dtype
    capability: int
    block_size: int = 1
    rank: int = 0
    """Landmarks per block, see `Tiling`."""

    tiles: tuple[tuple[str, TileSizes], ...] = ()
    """Kernels and their tile sizes that override the tables."""

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        priors: Tensor | None,
        phi: Phi,
        causal: bool,
        start: int,
    ) -> "Launcher":
        """The launcher for these arguments."""
        seq = SequenceInfo(None, start, None, k.shape[1], k.shape[2], q.shape[2], k.shape[2])
        group, keys = q.shape[1] // k.shape[1], 0 if priors is None else priors.shape[-1]
        sizes = (segment_length(phi, q, v, causal), group, v.shape[-1], keys)
        return Launcher(phi, seq, *sizes, causal, q.dtype, capability_of(q.device))

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
        """Tile sizes of the kernel with this name."""
        bound = max(64, self.phi.padded_features)
        size = self.dtype.itemsize
        exceptions, tiles = SMALL_EXCEPTIONS, SMALL_TILES
        if self.capability in WGMMA_CAPABILITIES or size == 4:
            exceptions, tiles = UNBOUNDED_EXCEPTIONS if self.phi.unbounded else EXCEPTIONS, TILES
        tile = dict(self.tiles).get(kernel) or exceptions.get((kernel, size, bound)) or tiles[size, bound]
        most = padded(self.segment)
        return tile._replace(chunk=min(tile.chunk, most), block=min(tile.block, most))

    def launch(
        self, kernel: Any, batch: int, *arguments: Any, programs: int | None = None, **options: Any
    ) -> None:
        """Launch a kernel, by default with as many `programs` as it needs."""
        all_programs, tiling, warps, stages = plan(self, kernel.__name__, batch)
        programs = all_programs if programs is None else programs
        options |= {"TILING": tiling, "PHI": self.phi}
        if programs:
            launch(kernel, (programs,), *arguments, warps=warps, stages=stages, **options)

    def split_dkv(self, buffers: tuple[Tensor | None, ...]) -> list[tuple[Tensor | None, ...]]:
        """The buffers of each launch of `bwd_dkv`: one launch cannot hold both dK and dV of wide features."""
        widest = 128 if self.capability in LARGE_SHARED_MEMORY else 64
        if self.phi.padded_features <= (widest if self.dtype.itemsize == 2 else 32):
            return [buffers]
        dk, dv, dy, dkey_weights, dpriors = buffers
        return [(dk, None, dy, None, dpriors), (None, dv, None, dkey_weights, None)]

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

    def sum_queries(self, queries: Queries, seq: SequenceInfo, like: Tensor, length: int) -> State:
        """What each segment's queries add to the gradient of the state that enters it, over `length` tokens."""
        buffer = self.segment_buffer(like, length, of_queries=True)
        if seq.queries:
            self.launch(query_kernels.write_queries, len(like), queries, buffer, seq)
        else:
            # Without queries, the gradient of the last state still passes through every segment to its keys.
            for part, value in zip(buffer, (0.0, 0.0, EMPTY)):
                part.fill_(value)
        return buffer

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


OVER_SEGMENTS = ("write_keys", "write_queries")
"""Kernels with one program per segment of a key head; the others have one per tile."""

OVER_QUERIES = ("read", "bwd_dq", "merge", "merge_backward")
"""Kernels with programs per query head; the others have programs per key head."""

OVER_KEYS = ("write_keys", "bwd_dkv")
"""Kernels with programs over keys; the others run over queries."""


@lru_cache(SHAPES_REMEMBERED)
def plan(launcher: Launcher, kernel: str, batch: int) -> LaunchPlan:
    """Programs and sizes of a kernel: one program per tile of queries or keys, or one per segment."""
    tile, seq, segment, group = launcher.tile_sizes(kernel), launcher.seq, launcher.segment, launcher.group
    tiling = Tiling(
        *(segment, tile.chunk, tile.block, group, launcher.values, padded(launcher.values)),
        *(launcher.keys, launcher.causal, launcher.block_size, launcher.rank),
    )
    length, span = (seq.keys, tiling.span) if kernel in OVER_KEYS else (seq.queries, segment)
    whole, rest = divmod(length, span)
    programs = whole * cdiv(span, tile.chunk) + cdiv(rest, tile.chunk)
    if kernel in OVER_SEGMENTS:
        programs = cdiv(length, span)
    heads = batch * seq.heads * (group if kernel in OVER_QUERIES else 1)
    return LaunchPlan(heads * programs, tiling, tile.warps, tile.stages)


def materialize_grads(
    of_out: Tensor | None, of_last: Tensors, q: Tensor, v: Tensor, last: Tensors
) -> list[Tensor]:
    """Gradients of the output, and of the `last` sums and normalizers if one of them has any; zeros replace None.

    Autograd's own materialization would fill zeros for every output of the op, even those without a gradient.
    """
    if of_out is None:
        of_out = v.new_zeros(*q.shape[:3], v.shape[-1])
    if all(grad is None for grad in of_last):
        return [of_out]
    return [of_out, *(torch.zeros_like(x) if grad is None else grad for grad, x in zip(of_last, last))]


def gradient_of_last(grad_sums: Tensor, grad_norms: Tensor, last_logs: Tensor) -> State:
    """The gradient of the last state as a state of queries; empty if the last state has no keys, and so no scale."""
    empty = last_logs <= EMPTY / 2
    return State(
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last_logs),
    )


def gradient_of_first(first_logs: Tensor | None, of_queries: State) -> tuple[Tensor, Tensor]:
    """Gradients of the first state's sums and normalizers, from the state of queries; empty without a first state."""
    if first_logs is None:
        return of_queries.sums.new_empty(0), of_queries.sums.new_empty(0)
    # The forward pass used the sums times exp(log scale).
    factor = torch.exp(first_logs + of_queries.logs)
    return of_queries.sums * factor[..., None, None], of_queries.norms * factor[..., None]
