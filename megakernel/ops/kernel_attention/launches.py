"""What the launches of kernel attention's kernels have in common: the sizes of a call, and the states between them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import query_kernels
from megakernel.ops.kernel_attention.arguments import Queries, SequenceInfo, State, Tiling
from megakernel.ops.kernels import states
from megakernel.ops.kernels.features import Phi, cdiv, padded, phi_of, power_of_two
from megakernel.ops.kernels.launch import PROGRAMS, capability_of, launch
from megakernel.ops.state import EMPTY, KernelState

LONGEST_CHUNK = 64
"""Tokens of a chunk of sequences that see both ways, which their segments are multiples of."""

STATE_SHARE = 0.02
"""Share of the bytes of q, k, v and out that their states may take on long sequences."""

FEATURES_AT_ONCE = 8
"""Rows of a state that one program passes from segment to segment."""

SEGMENT = 128
"""Tokens between two states that causal sequences have in memory, of up to 64 features; of more, as many more. States
are then a quarter of q, k, v and out at most, and the pairs of a segment cost about what its state does."""


class TileSizes(NamedTuple):
    """What one program of a kernel holds."""

    chunk: int
    """Rows whose sums it holds."""

    block: int
    """Rows that it goes by."""

    warps: int
    stages: int = 1
    """Blocks that are on their way from memory at once."""


TILES: dict[tuple[int, int], TileSizes] = {
    (2, 64): TileSizes(128, 32, 8),
    (2, 128): TileSizes(128, 64, 8, 2),
    (2, 256): TileSizes(128, 64, 8),
    (4, 64): TileSizes(32, 32, 4),
    (4, 128): TileSizes(16, 16, 4),
}
"""(bytes of a number, padded features up to this) -> what programs hold, where four warps multiply tiles of 64 rows."""

EXCEPTIONS: dict[tuple[str, int, int], TileSizes] = {
    ("write_keys", 2, 128): TileSizes(128, 64, 8),
    ("bwd_dq", 2, 128): TileSizes(128, 32, 8),
    ("bwd_dq_one_pass", 2, 128): TileSizes(128, 32, 8),
    ("bwd_dkv", 2, 128): TileSizes(128, 32, 8),
    ("write_queries", 2, 256): TileSizes(64, 64, 8),
    ("bwd_dkv", 2, 256): TileSizes(128, 32, 8),
    ("bwd_dq", 4, 64): TileSizes(16, 16, 4),
    ("bwd_dq_one_pass", 4, 64): TileSizes(16, 16, 4),
}
"""(kernel, bytes of a number, padded features up to this) -> what programs of kernels with more or less to hold do."""

SMALL_TILES: dict[tuple[int, int], TileSizes] = {
    (2, 64): TileSizes(64, 32, 4),
    (2, 128): TileSizes(64, 32, 8),
    (2, 256): TileSizes(64, 32, 8),
}
"""The same for GPUs whose products take their factors from registers, and which have less shared memory."""

SMALL_EXCEPTIONS: dict[tuple[str, int, int], TileSizes] = {
    ("bwd_dq", 2, 128): TileSizes(32, 32, 8),
    ("bwd_dq_one_pass", 2, 128): TileSizes(32, 32, 8),
    ("write_queries", 2, 256): TileSizes(16, 16, 8),
}
"""The same of kernels that would spill more than they may with those."""

WARP_GROUPS = (90,)
"""Compute capabilities of GPUs with products of four warps. For 100 and 103, whose products are others, Triton 3.7 does
not compile all of these tiles."""

ROOMY = (80, 90, 100, 103)
"""Compute capabilities of GPUs whose programs may take 163 KiB of shared memory; those of 86, 89 and 120 have 99."""


def tiles_of(state: KernelState, phi: Phi, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """A state as kernels read it: sums (B, H_kv, FP, VP), normalizers (B, H_kv, FP), log scales."""
    halves = phi.features // phi.rows
    lead = state.sums.unflatten(2, (halves, phi.rows)).to(torch.float32)
    whole = torch.nn.functional.pad(lead, (0, 0, 0, phi.padded_rows - phi.rows)).flatten(2, 3)
    sums = torch.nn.functional.pad(whole[..., :-1], (0, padded(value_dim) - value_dim))
    logs = state.log_scale.to(torch.float32)
    # Of bounded maps only the empty state has a scale, by which window and landmarks would be compared.
    return (
        sums.contiguous(),
        whole[..., -1].contiguous(),
        logs.contiguous() if phi.unbounded else torch.zeros_like(logs),
    )


def state_of(sums: Tensor, norms: Tensor, logs: Tensor, phi: Phi, value_dim: int) -> KernelState:
    """The inverse of `tiles_of`."""
    halves = phi.features // phi.rows
    whole = torch.cat([sums[..., :value_dim], norms[..., None]], -1)
    saved = whole.unflatten(2, (halves, phi.padded_rows))[:, :, :, : phi.rows].flatten(2, 3)
    return KernelState(saved, logs.detach())


def segment_of(phi: Phi, q: Tensor, v: Tensor, causal: bool) -> int:
    """Tokens of a segment, a power of two of LONGEST_CHUNK that depends on shapes alone.

    Without pairs, segments only share the work out. They are as long as leaves states STATE_SHARE of the memory of
    q, k, v and out; where the batch is so small that this leaves fewer than PROGRAMS, as short as gives that many. Of
    keys and queries the longer sequences decide: both keep states in backward.
    """
    if causal:
        return SEGMENT * max(1, phi.padded_features // 64)
    batch, heads, queries, width = q.shape
    key_heads, keys, values = v.shape[1:]
    token = (heads + key_heads) * (width + values) * v.element_size()
    state = key_heads * phi.padded_features * (padded(values) + 1) * 4
    frugal = power_of_two(cdiv(int(state / STATE_SHARE), token))
    parallel = power_of_two(max(1, batch * key_heads * max(queries, keys) // PROGRAMS))
    return max(LONGEST_CHUNK, min(frugal, max(parallel, 4 * LONGEST_CHUNK)))


class Call(NamedTuple):
    """What all launches of a call share."""

    phi: Phi
    seq: SequenceInfo
    """Of tokens, without the table of their documents."""

    segment: int
    group: int
    values: int
    keys: int
    """Of a position in a mixture, 0 without."""

    causal: bool
    dtype: torch.dtype
    capability: int
    block_size: int = 1
    rank: int = 0
    """Of landmarks, see `Tiling`."""

    tiles: dict[str, TileSizes] | None = None
    """Kernel -> what its programs hold, where the tables do not say it."""

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        priors: Tensor | None,
        feature_map: str,
        components: int,
        causal: bool,
        start: int,
        decays: bool,
    ) -> "Call":
        """The call with these arguments."""
        rows = None if matrix is None else matrix.shape[-2]
        phi = phi_of(FeatureMap(feature_map, components), q.shape[-1], rows, decays)
        seq = SequenceInfo(None, start, None, k.shape[1], k.shape[2], q.shape[2], k.shape[2])
        group, keys = q.shape[1] // k.shape[1], 0 if priors is None else priors.shape[-1]
        sizes = (segment_of(phi, q, v, causal), group, v.shape[-1], keys)
        return Call(phi, seq, *sizes, causal, q.dtype, capability_of(q.device))

    @property
    def stored(self) -> bool:
        """Whether features are in memory."""
        return self.phi.projected or self.phi.decays or self.keys > 0

    def features(self, tokens: Tensor, stored: bool) -> tuple[Tensor | None, Tensor | None]:
        """A buffer for the features of tokens (B, H, N, d), and their log scales."""
        if not stored:
            return None, None
        lead = tokens.shape[:3]
        logs = tokens.new_empty(lead, dtype=torch.float32) if self.phi.unbounded else None
        return tokens.new_empty(*lead, self.phi.padded_features), logs

    def tile(self, kernel: str) -> TileSizes:
        """What programs of the kernel of this name hold."""
        bound = max(64, self.phi.padded_features)
        size = self.dtype.itemsize
        exceptions, tiles = SMALL_EXCEPTIONS, SMALL_TILES
        if self.capability in WARP_GROUPS or size == 4:
            exceptions, tiles = EXCEPTIONS, TILES
        tile = (self.tiles or {}).get(kernel) or exceptions.get((kernel, size, bound)) or tiles[size, bound]
        most = padded(self.segment)
        return tile._replace(chunk=min(tile.chunk, most), block=min(tile.block, most))

    @property
    def tiling(self) -> Tiling:
        """How sequences are cut, but for the tiles of a kernel."""
        sizes = (self.group, self.values, padded(self.values), self.keys, self.causal)
        return Tiling(self.segment, 0, 0, *sizes, self.block_size, self.rank)

    def programs(self, kernel: str, batch: int) -> int:
        """Of a kernel: one for each tile of queries or keys, or segment that it sums."""
        of_keys = kernel in OVER_KEYS
        length = self.seq.keys if of_keys else self.seq.queries
        span = self.tiling.span if of_keys else self.segment
        heads = batch * self.seq.heads * (self.group if kernel in OVER_QUERIES else 1)
        if kernel in OVER_SEGMENTS:
            return heads * cdiv(length, span)
        whole, rest = divmod(length, span)
        chunk = self.tile(kernel).chunk
        return heads * (whole * cdiv(span, chunk) + cdiv(rest, chunk))

    def start(
        self, kernel: Any, batch: int, *arguments: Any, programs: int | None = None, **options: Any
    ) -> None:
        """Start a kernel, with the `programs` that it has if not given."""
        tile = self.tile(kernel.__name__)
        programs = self.programs(kernel.__name__, batch) if programs is None else programs
        options |= {"TILING": self.tiling._replace(chunk=tile.chunk, block=tile.block), "PHI": self.phi}
        if programs:
            launch(kernel, (programs,), *arguments, warps=tile.warps, stages=tile.stages, **options)

    def halves(self, buffers: tuple[Tensor | None, ...]) -> list[tuple[Tensor | None, ...]]:
        """The buffers of `bwd_dkv` by launch: gradients of keys and of values do not fit into one of wide features."""
        of_half = 128 if self.capability in ROOMY else 64
        if self.phi.padded_features <= (of_half if self.dtype.itemsize == 2 else 32):
            return [buffers]
        dk, dv, dy, dkey_weights, dpriors = buffers
        return [(dk, None, dy, None, dpriors), (None, dv, None, dkey_weights, None)]

    def states(self, like: Tensor, entries: int, dtype: torch.dtype = torch.float32) -> State:
        """A buffer for so many states of each key head, or one without a dimension of its own."""
        lead = (like.shape[0], self.seq.heads, *[entries] * (entries >= 0))
        size = self.phi.padded_features
        sums = like.new_empty(*lead, size, padded(self.values), dtype=dtype)
        return State(
            sums, like.new_empty(*lead, size, dtype=torch.float32), like.new_empty(lead, dtype=torch.float32)
        )

    def sums_of_segments(self, like: Tensor, length: int, of_queries: bool = False) -> State:
        """A buffer for what segments add, and then for the states that enter them: factors of products.

        Where one key has nearly all of its queries' weights, its gradient is what is left of a state of queries when
        most of that cancels. Of maps of which this is to be expected, such states keep float32's digits.
        """
        is_exact = self.dtype != torch.bfloat16 or (of_queries and self.phi.unbounded)
        dtype = torch.float32 if is_exact else torch.bfloat16
        return self.states(like, cdiv(length, self.segment), dtype)

    def sums_of_queries(self, queries: Queries, seq: SequenceInfo, like: Tensor, length: int) -> State:
        """What the queries of each segment of `length` tokens add to the gradients of states."""
        buffer = self.sums_of_segments(like, length, of_queries=True)
        if seq.queries:
            self.start(query_kernels.write_queries, len(like), queries, buffer, seq)
        else:
            # A sequence without queries of its own hands the last state's gradient to its keys, segment by segment.
            for part, nothing in zip(buffer, (0.0, 0.0, EMPTY)):
                part.fill_(nothing)
        return buffer

    def pass_on(
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
        """The states that enter each segment, from what each segment adds, and the last one.

        Without `keep` the last one alone: `buffer` still holds what segments add. In reverse, given the states that
        `entered` segments from the left, also (B, H_kv, segments): what a change of those by a factor changes.
        """
        entering = State(buffer.sums, torch.empty_like(buffer.norms), torch.empty_like(buffer.logs))
        saved = entering[1:] if keep and self.causal else (None, None)
        last = self.states(buffer.norms, -1)
        batch, heads, segments = buffer.logs.shape
        programs = cdiv(self.phi.padded_features, FEATURES_AT_ONCE)
        along = None if entered is None else buffer.logs.new_empty(batch, heads, programs, segments)
        launch(
            states.pass_states,
            (batch * heads, programs),
            *(buffer, *saved, first, last, seq.starts, None if seq.decay is None else seq.decay.of_segments),
            *(entered, along),
            # No document begins in a sequence that sees both ways.
            *(length, seq.start if self.causal else -1, seq.heads, segments),
            warps=4,
            SEGMENT=self.segment,
            FP=self.phi.padded_features,
            VP=padded(self.values),
            BF=FEATURES_AT_ONCE,
            REVERSE=reverse,
            UNBOUNDED=self.phi.unbounded,
        )
        return entering, last, None if along is None else along.sum(2)


OVER_SEGMENTS = ("write_keys", "write_queries")
"""Kernels whose programs are of a segment of a key head; the others' are of a tile."""

OVER_QUERIES = ("read", "bwd_dq", "bwd_dq_one_pass", "merge", "merge_backward")
"""Kernels whose programs are of a query's head."""

OVER_KEYS = ("write_keys", "bwd_dkv")
"""Kernels whose programs are of keys; the others' are of queries."""


def given_or_zeros(
    of_out: Tensor | None, of_last: Tensors, q: Tensor, v: Tensor, last: Tensors
) -> list[Tensor]:
    """Gradients of the output, and of the `last` sums and normalizers where one of them has any.

    Autograd would fill one for each output of an op, those that nobody differentiates included.
    """
    if of_out is None:
        of_out = v.new_zeros(*q.shape[:3], v.shape[-1])
    if all(grad is None for grad in of_last):
        return [of_out]
    return [of_out, *(torch.zeros_like(x) if grad is None else grad for grad, x in zip(of_last, last))]


def gradient_of_last(grad_sums: Tensor, grad_norms: Tensor, last_logs: Tensor) -> State:
    """The gradient of a last state as one of queries. Without keys it has one and no scale: that goes to nothing."""
    empty = last_logs <= EMPTY / 2
    return State(
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last_logs),
    )


def gradient_of_first(first_logs: Tensor | None, found: State) -> tuple[Tensor, Tensor]:
    """Gradients of a first state's sums and normalizers, from the state of queries; empty where there was none."""
    if first_logs is None:
        return found.sums.new_empty(0), found.sums.new_empty(0)
    # Sums are those of the first state times exp(its log scale).
    factor = torch.exp(first_logs + found.logs)
    return found.sums * factor[..., None, None], found.norms * factor[..., None]
