"""Kernel attention in Triton: two large launches and a small one forward, three or four and a small one backward.

Forward sums the keys of each segment, scans these sums into the states that enter the segments (the small launch), and
computes outputs. Backward computes dQ, sums queries per segment, scans these sums from right to left, and computes dK
and dV. An exchange adds a small launch to each pass, for the state that is sent. Saved for backward are the inputs, the
output, two numbers per token, one state per segment, and the features of keys if the map has a projection.

Keys k are (B, H_kv, N, d); with priors (H_kv, M), the M keys of a position are adjacent, (B, H_kv, N, M d).
"""

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions, cached_for_positions
from megakernel.ops.feature_maps import Map, named
from megakernel.ops.kernel_attention import chunked, decode, kernels, key_kernels, query_kernels, tiles
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.kernels.arguments import Keys, Matrix, Queries, Rows, SequenceInfo, State, Tokens
from megakernel.ops.kernels.decay import Decay, gradient_of_decay
from megakernel.ops.kernels.feature_maps import SUPPORTED, Phi
from megakernel.ops.kernels.launch import capability_of
from megakernel.ops.kernels.launcher import Grid, Launcher, map_of_call, output_buffer
from megakernel.ops.kernels.operator import Operator
from megakernel.ops.kernels.protocol import Op, QueryBackward, Saved, StatesBackward
from megakernel.ops.partial_output import kernels_check, recompute_lost
from megakernel.ops.projections import Projection, dense, rows_of
from megakernel.ops.state import EMPTY, KernelState

WIDEST = 128
"""Largest d and M; beyond that, a program's tiles do not fit into registers."""

WIDEST_FLOAT32 = 64
"""The same in float32, whose matrix products take three registers per element: wider tiles would spill."""

MIN_CAPABILITY = 80
"""Lowest supported compute capability; on older GPUs, tiles spill kilobytes."""


def unsupported_features(q: Tensor, feature_map: Map | str) -> str | None:
    """Why the kernels do not support this dtype or feature map; None if they do."""
    feature_map = named(feature_map)
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"q is {q.dtype}; expected bfloat16, float16 or float32"
    if feature_map.name not in SUPPORTED or feature_map.smoothing:
        actual = f"{feature_map.name} with smoothing" if feature_map.smoothing else feature_map.name
        return f"feature_map is {actual}; expected {', '.join(SUPPORTED)} without smoothing"
    return None


def unsupported_tiles(
    q: Tensor, v: Tensor, projection: Projection | None, max_width: int, max_value_width: int
) -> str | None:
    """Why kernels with matrix products of tiles do not support the GPU, dtype or widths; None if they do."""
    if (capability := capability_of(q.device)) < MIN_CAPABILITY:
        return f"the GPU has compute capability {capability / 10}; expected at least {MIN_CAPABILITY / 10}"
    if q.dtype == torch.float16:
        # Sums over many keys overflow it, and weights of exponential maps underflow.
        return (
            "q is torch.float16, whose range is too small for sums and weights; expected bfloat16 or float32"
        )
    width = q.shape[-1]
    sizes = {
        "q": (width, max_width),
        "v": (v.shape[-1], max_value_width),
        "projection": (rows_of(projection, width), max_width),
    }
    for name, (size, limit) in sizes.items():
        if size > limit:
            return f"{name} has width {size} in {q.dtype}; expected at most {limit}"
    return None


def unsupported(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    if (reason := unsupported_features(q, options.feature_map)) is not None:
        return reason
    if decode.unsupported(q, k, v, options) is None:
        return None
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if (reason := unsupported_tiles(q, v, options.projection, most, WIDEST)) is not None:
        return reason
    if not options.causal and isinstance(options.positions, Tensor):
        return "positions split sequences into documents, without causal; expected one document per sequence"
    if options.exchange_after is not None:
        return "exchange_after is given; expected causal attention"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState | None]:
    """Same arguments and results as `chunked.attend`, in bfloat16 or float32; single tokens in float16 too.

    The state is None if `options` do not ask for it.

    Quotients of exponential maps can get lost to underflow; such queries are recomputed by the chunked op in float64,
    or are 0: see `kernels_check`. Compiled or captured graphs cannot check, and there they are 0.
    """
    if decode.unsupported(q, k, v, options) is None:
        return decode.step(q, k, v, options)
    feature_map, projection, causal, normalize, key_weights, priors, positions, first, exchange, *_ = options
    matrix = dense(projection, q.shape[-1])
    starts, start = document_starts(positions, k.shape[2])
    feature_map = named(feature_map)
    outputs, first, last = kernel_operator(
        KernelStatic(feature_map.name, feature_map.components, causal, normalize, start),
        KernelQueryTensors(q),
        KernelKeyTensors(k, v, matrix, key_weights=key_weights, priors=priors, starts=starts),
        positions,
        first,
        exchange,
        options.return_state,
    )
    if not kernels_check(feature_map, normalize, q):
        return outputs.out, last
    lost = outputs.reciprocal == 0
    if key_weights is not None:
        # Padding (key weight 0) and queries that see no key are not lost: their outputs stay 0.
        real = key_weights != 0
        if options.cross:
            real = real.any(-1, keepdim=True)
        lost &= real.repeat_interleave(q.shape[1] // k.shape[1], 1)

    def recompute() -> Tensor:
        # With an exchange, `first` is the state that came from the other ranks.
        exact = options._replace(projection=matrix, initial_state=first, exchange=None)
        return chunked.attend(q.double(), k.double(), v.double(), exact)[0]

    return recompute_lost((outputs.out, lost), recompute), last


def document_starts(positions: Positions, length: int) -> tuple[Tensor | None, int]:
    """Where each token's document starts, (B, N) int32, or one place for all; negative if before the sequence."""
    if isinstance(positions, int):
        return None, -1 if positions > 0 else 0

    def make_starts(positions: Tensor) -> Tensor:
        places = torch.arange(length, device=positions.device)
        return (places - positions).clamp(min=-1).to(torch.int32)

    return cached_for_positions(positions, document_starts, make_starts), 0


LARGE_SHARED_MEMORY = (80, 90, 100, 103)
"""Compute capabilities of GPUs with at least 163 KiB of shared memory per program; 86, 89 and 120 have 99 KiB."""


class KernelQueryTensors(NamedTuple):
    """Tensors of queries."""

    q: Tensor
    """(B, H, N, d)"""


class KernelKeyTensors(NamedTuple):
    """Tensors of keys, and their gradients.

    log_decay requires the map `identity` without normalizer or priors; weights are then divided by sqrt(d).
    """

    k: Tensor
    """(B, H_kv, N, d), or (B, H_kv, N, M d) with priors."""

    v: Tensor
    """(B, H_kv, N, D)"""

    projection: Tensor | None = None
    """(M, d) or (H_kv, M, d)"""

    log_decay: Tensor | None = None
    """(B, H_kv, N)"""

    key_weights: Tensor | None = None
    """(B, H_kv, N)"""

    priors: Tensor | None = None
    """(H_kv, M)"""

    starts: Tensor | None = None
    """(B, N) int32, see `SequenceInfo`."""


class KernelStatic(NamedTuple):
    """What is no tensor."""

    feature_map: str
    components: int
    causal: bool
    normalize: bool
    start: int
    """See `SequenceInfo`."""


class KernelOutputs(NamedTuple):
    """Outputs, and what backward needs of queries."""

    out: Tensor
    """(B, H, N, D)"""

    reciprocal: Tensor
    """1 / den (B, H, N) float32."""


class SavedKeys(NamedTuple):
    """What backward needs of keys; unused tensors are empty."""

    scale: Tensor
    """r of the queries (B, H_kv, N) float32."""

    features: Tensor
    logs: Tensor
    """Log scales of the features."""

    terms: Tensor
    """The split projection."""


def launcher_of(
    q: Tensor, k: Tensor, v: Tensor, priors: Tensor | None, phi: Phi, causal: bool, start: int
) -> Launcher:
    """The launcher for these arguments."""
    seq = SequenceInfo(None, start, None, k.shape[1], k.shape[2], q.shape[2], k.shape[2])
    capability = capability_of(q.device)
    return Launcher(
        phi=phi,
        seq=seq,
        segment=tiles.segment_length(phi, q, v, causal),
        group=q.shape[1] // k.shape[1],
        values=v.shape[-1],
        keys=0 if priors is None else priors.shape[-1],
        causal=causal,
        dtype=q.dtype,
        capability=capability,
        tiles=tuple(tiles.tile_sizes(phi, q.element_size(), capability).items()),
    )


def sum_queries(launcher: Launcher, queries: Queries, seq: SequenceInfo, like: Tensor, length: int) -> State:
    """What each segment's queries add to the gradient of the state that enters it, over `length` tokens."""
    buffer = launcher.segment_buffer(like, length, of_queries=True)
    if seq.queries:
        launcher.launch(
            query_kernels.write_queries, len(like), queries, buffer, seq, grid=Grid.QUERY_SEGMENTS
        )
    else:
        # Without queries, the gradient of the last state still passes through every segment to its keys.
        for part, value in zip(buffer, (0.0, 0.0, EMPTY)):
            part.fill_(value)
    return buffer


def bwd_dkv(
    launcher: Launcher, batch: int, inputs: tuple[Any, ...], buffers: tuple[Rows | Tensor | None, ...]
) -> None:
    """Launch `bwd_dkv`, for wide features twice: one launch cannot hold both dK and dV."""
    widest = 128 if launcher.capability in LARGE_SHARED_MEMORY else 64
    passes = [buffers]
    if launcher.phi.padded_features > (widest if launcher.dtype.itemsize == 2 else 32):
        dk, dv, dy, dkey_weights, dpriors = buffers
        passes = [(dk, None, dy, None, dpriors), (None, dv, None, dkey_weights, None)]
    for each in passes:
        launcher.launch(key_kernels.bwd_dkv, batch, *inputs, *each, grid=Grid.KEY_TILES)


class KernelLaunches(NamedTuple):
    """Implements `kernels.protocol.Launches`."""

    launcher: Launcher
    projection: Tensor | None
    seq: SequenceInfo
    keys: Keys
    """Without features."""

    matrix: Matrix
    normalize: bool

    @staticmethod
    def of(static: KernelStatic, q: Tensor, tensors: KernelKeyTensors) -> "KernelLaunches":
        """The launches for queries q (B, H, N, d)."""
        k, v, projection, log_decay, key_weights, priors, starts = tensors
        phi = map_of_call(static, q, projection, log_decay is not None)
        launcher = launcher_of(q, k, v, priors, phi, static.causal, static.start)
        key_weights, priors = (
            None if x is None else x.to(torch.float32).contiguous() for x in (key_weights, priors)
        )
        keys = Keys(Tokens(Rows.of(k), None, None), Rows.of(v), key_weights, priors)
        decay = None
        if log_decay is not None:
            decay = Decay.of_tokens(log_decay, launcher.segment, q.shape[-1] ** -0.5)
        seq = launcher.seq._replace(starts=starts, decay=decay)
        matrix = Matrix.of(projection, k.shape[1])
        return KernelLaunches(launcher, projection, seq, keys, matrix, static.normalize)

    @property
    def k(self) -> Tensor:
        """Keys."""
        return self.keys.tokens.rows.pointer

    @property
    def v(self) -> Tensor:
        """Values."""
        return self.keys.v.pointer

    def key_buffers(self) -> SavedKeys:
        """Buffers for what `write` saves."""
        k = self.k
        scale = k.new_empty(*k.shape[:2], self.seq.queries * self.launcher.phi.unbounded, dtype=torch.float32)
        features, logs = self.launcher.feature_buffers(k)
        return SavedKeys(
            scale,
            features=k.new_empty(0) if features is None else features,
            logs=scale.new_empty(0) if logs is None else logs,
            terms=self.matrix.buffer(self.projection, k),
        )

    def output_buffers(self, queries: KernelQueryTensors) -> KernelOutputs:
        """Buffers for what `read` returns."""
        lead = queries.q.shape[:3]
        return KernelOutputs(output_buffer(queries.q, self.v), self.v.new_empty(lead, dtype=torch.float32))

    def keys_and_matrix(self, saved: SavedKeys) -> tuple[Keys, Matrix]:
        """The keys with their stored features, and the projection."""
        stored = (x if x.numel() else None for x in (saved.features, saved.logs))
        tokens = Tokens(self.keys.tokens.rows, *stored)
        return self.keys._replace(tokens=tokens), self.matrix.split(saved.terms)

    def write(self) -> tuple[State, SavedKeys]:
        """See `Launches`."""
        launcher, saved = self.launcher, self.key_buffers()
        scale = saved.scale if launcher.causal and launcher.phi.unbounded else None
        buffer = launcher.segment_buffer(self.k, self.seq.keys)
        self.matrix.fill(saved.terms)
        inputs = (*self.keys_and_matrix(saved), buffer, self.seq, scale)
        launcher.launch(kernels.write_keys, len(self.k), *inputs, grid=Grid.KEY_SEGMENTS)
        return buffer, saved

    def read_ahead(self, queries: KernelQueryTensors, saved: SavedKeys) -> None:
        """None: pairs of a segment and the state have one sum, which would go through memory in between."""

    def read(
        self, queries: KernelQueryTensors, saved: SavedKeys, state: State, ahead: None = None
    ) -> KernelOutputs:
        """See `Launches`."""
        q, outputs = queries.q, self.output_buffers(queries)
        scale = saved.scale if self.launcher.phi.unbounded else None
        inputs = (Rows.of(q), *self.keys_and_matrix(saved), state, self.seq)
        buffers = (Rows.to_write(outputs.out), outputs.reciprocal, scale, None)
        grid = Grid.QUERY_TILES
        self.launcher.launch(kernels.read, len(q), *inputs, *buffers, grid=grid, NORMALIZE=self.normalize)
        return outputs

    def bwd_read(
        self,
        do: Tensor,
        queries: KernelQueryTensors,
        saved: Saved,
        dq: Tensor,
        needs_projection: bool,
        *,
        exchanges: bool = False,
    ) -> QueryBackward:
        """See `Launches`; leaves nothing to `finish_dq`."""
        launcher, q, (out, reciprocal) = self.launcher, queries.q, saved.outputs
        dproj = self._projected(q) if needs_projection else None
        bwd_queries = Queries(
            Tokens(Rows.of(q), *launcher.feature_buffers(q)),
            Rows.of(do),
            reciprocal,
            torch.empty_like(reciprocal) if self.normalize else None,
            saved.keys.scale if launcher.phi.unbounded else None,
        )
        inputs = (bwd_queries, *self.keys_and_matrix(saved.keys), saved.state, self.seq)
        reads_output = self.normalize and not launcher.phi.unbounded
        outputs = (Rows.of(out) if reads_output else None, None, Rows.to_write(dq), dproj)
        grid = Grid.QUERY_TILES
        arguments = (len(q), *inputs, *outputs)
        launcher.launch(query_kernels.bwd_dq, *arguments, grid=grid, NORMALIZE=self.normalize)
        projection_grad = later_products(dproj, q, self.seq.heads)
        return QueryBackward(bwd_queries, KernelQueryTensors(dq), projection_grad)

    def sum_queries(self, queries: Queries, length: int) -> State:
        """See `Launches`."""
        return sum_queries(self.launcher, queries, self.seq, self.k, length)

    def bwd_write(
        self,
        query_backward: QueryBackward,
        saved: SavedKeys,
        states: StatesBackward,
        dk: Tensor,
        dv: Tensor,
    ) -> KernelKeyTensors:
        """See `Launches`."""
        launcher, k = self.launcher, self.k
        needs_projection = query_backward.projection_grad is not None
        dproj = self._projected(k, max(launcher.keys, 1)) if needs_projection else None
        key_weights, decay = self.keys.key_weights, self.seq.decay
        dkey_weights = None
        if key_weights is not None or decay is not None:
            dkey_weights = k.new_empty(k.shape[:3], dtype=torch.float32)
        dprior_parts = (
            k.new_empty(*k.shape[:3], launcher.keys, dtype=torch.float32) if launcher.keys else None
        )
        inputs = (query_backward.queries, *self.keys_and_matrix(saved), states.of_queries, self.seq)
        buffers = (Rows.to_write(dk), Rows.to_write(dv), dproj, dkey_weights, dprior_parts)
        bwd_dkv(launcher, len(k), inputs, buffers)
        grads = KernelKeyTensors(dk, dv)
        if dprior_parts is not None:
            grads = grads._replace(priors=dprior_parts.sum((0, 2)))
        if dproj is not None and query_backward.projection_grad is not None and self.projection is not None:
            keys = k.unflatten(-1, (max(launcher.keys, 1), -1)).movedim(3, 2).flatten(1, 2)
            of_keys = products_of_tokens(dproj.movedim(0, 2).flatten(1, 2), keys, self.seq.heads)
            of_queries = query_backward.projection_grad()
            grads = grads._replace(projection=gradient_of_projection(self.projection, of_keys, of_queries))
        if key_weights is not None:
            grads = grads._replace(key_weights=dkey_weights)
        if decay is None or dkey_weights is None:
            return grads
        # Gradients of the log scales of a key and of a query, in both of which their weights are linear.
        of_keys = dkey_weights if key_weights is None else dkey_weights * key_weights
        q, dq = query_backward.queries.tokens.rows.pointer, query_backward.grads.q
        of_queries = (q.float() * dq).sum(-1).unflatten(1, (self.seq.heads, -1)).sum(2)
        sums = (of_keys, of_queries, *states.of_entering)
        return grads._replace(
            log_decay=gradient_of_decay(*sums, self.seq, launcher.segment, decay_after_read=False)
        )

    def _projected(self, tokens: Tensor, *lead: int) -> Tensor:
        """A buffer for the gradients of projected tokens."""
        return tokens.new_empty(*lead, *tokens.shape[:3], self.launcher.phi.rows)


def products_of_tokens(dproj: Tensor, x: Tensor, heads: int) -> Tensor:
    """The sum over tokens of dproj x^T, (heads, M, d), for dproj (B, H, N, M) and x (B, H, N, d).

    H is a multiple of `heads`, whose members are adjacent. The sum over more than one product is float32.
    """
    # A product per sequence reads views of it. One product over the batch would copy both operands.
    products = [torch.bmm(y.transpose(1, 2), x_part) for y, x_part in zip(dproj, x)]
    if len(products) == 1 and heads == dproj.shape[1]:
        return products[0]
    return torch.stack(products).unflatten(1, (heads, -1)).sum((0, 2), dtype=torch.float32)


def later_products(dproj: Tensor | None, x: Tensor, heads: int) -> Callable[[], Tensor] | None:
    """Computes `products_of_tokens` once, when it is asked for: see `QueryBackward`; None without gradients."""
    return None if dproj is None else cache(partial(products_of_tokens, dproj, x, heads))


def gradient_of_projection(projection: Tensor, *parts: Tensor) -> Tensor:
    """The gradient of a projection (M, d) or (H_kv, M, d), from parts (H_kv, M, d) that are summed in float32."""
    per_head = reduce(torch.add, parts[1:], parts[0].float()).to(projection.dtype)
    return per_head.sum(0) if projection.dim() == 2 else per_head


kernel_operator = Operator(
    "kernel_attention",
    Op(KernelQueryTensors, KernelKeyTensors, KernelStatic, KernelOutputs, SavedKeys, KernelLaunches.of),
)
"""Kernel attention of these tensors and an initial state."""
