"""Causal FLuRKA in Triton: four launches forward, six or seven backward.

Forward pools blocks into landmarks, sums those of each segment, scans the sums into the states that enter the segments
(a small launch), and merges window and landmarks. Backward computes the gradients of queries through both, scans states
of queries from right to left, and computes the gradients of landmarks, and through them and the windows those of keys,
values, E and F. An exchange adds a small launch to each pass, for the state that is sent. Saved for backward are the
inputs, the output, its spread (see `merge_kernels`), two or three numbers per token, the landmarks, and one state per
segment.

Landmarks are keys of `kernel_attention`'s kernels, which sum them, scan their states and compute their gradients.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import sees_far, token_positions
from megakernel.ops.feature_maps import named
from megakernel.ops.flurka_attention import chunked, decode, merge_kernels, pool_kernels, window_kernels
from megakernel.ops.flurka_attention.arguments import (
    Merged,
    MergeParams,
    NearParams,
    Pools,
    Window,
    WindowSums,
)
from megakernel.ops.flurka_attention.block_tables import block_tables, ends_of_blocks
from megakernel.ops.flurka_attention.options import FlurkaInputs, FlurkaOptions
from megakernel.ops.flurka_attention.tensors import (
    FlurkaKeyTensors,
    FlurkaOutputs,
    FlurkaQueryTensors,
    FlurkaStatic,
    SavedLandmarks,
)
from megakernel.ops.flurka_attention.tiles import queries_ahead, segment_blocks, tile_sizes
from megakernel.ops.kernel_attention import kernels
from megakernel.ops.kernel_attention.triton import (
    bwd_dkv,
    gradient_of_projection,
    later_products,
    products_of_tokens,
    sum_queries,
    unsupported_features,
    unsupported_tiles,
)
from megakernel.ops.kernels.arguments import Matrix, Queries, Rows, SequenceInfo, State, Tokens
from megakernel.ops.kernels.decay import Decay, gradient_of_decay
from megakernel.ops.kernels.launch import capability_of
from megakernel.ops.kernels.launcher import Grid, Launcher, map_of_call, output_buffer
from megakernel.ops.kernels.operator import Operator
from megakernel.ops.kernels.primitives import cdiv, padded
from megakernel.ops.kernels.protocol import Op, QueryBackward, Saved, StatesBackward
from megakernel.ops.partial_output import kernels_check, recompute_lost
from megakernel.ops.projections import dense
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail, empty_tail

WIDEST = 128
"""Largest d, M and b; beyond that, a program's tiles do not fit into registers."""

WIDEST_FLOAT32 = 16
"""The same in float32, whose matrix products take three registers per element. For a map with two halves, `read` spills
up to 456 bytes per thread at 32, and 24 bytes at 16. Wider heads run chunked."""

HIGHEST_RANK = 64
"""Largest r, for the same reason."""

ANGLES = 256
"""Rows of the table of angles beyond the window: a tile of queries and one of keys."""

SIGNED = ("identity", "rks")
"""Feature maps whose sums of weights may be negative."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    options, weights = inputs.options, inputs.weights
    if (reason := unsupported_features(q, options.feature_map)) is not None:
        return reason
    if inputs.log_decay is not None and options.near == "kernel":
        return "log_decay is given, and near is kernel; expected near='softmax'"
    if weights.priors is not None:
        return "priors are given; expected one key per position"
    if options.far_rotary is not None:
        return "far_rope='centroid' rotates landmarks; expected far_rope='none'"
    if options.near_rotary is not None and angle_table(options, q.shape[-1]) is None:
        return "rotary is not an `attention.Rotary` of whole heads; expected one"
    name = named(options.feature_map).name
    if name in SIGNED and options.near == "softmax" and inputs.gate is None:
        return f"feature_map {name} gives negative weights, which cannot share a softmax's normalizer; expected a gate"
    if decode.unsupported(q, k, v, inputs) is None:
        return None
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if (reason := unsupported_tiles(q, v, weights.projection, most, most)) is not None:
        return reason
    if options.block_size > WIDEST:
        return f"blocks have {options.block_size} tokens; expected at most {WIDEST}"
    if weights.pool_keys.shape[-2] > HIGHEST_RANK:
        return f"blocks have {weights.pool_keys.shape[-2]} landmarks; expected at most {HIGHEST_RANK}"
    return None


def angle_table(options: FlurkaOptions, width: int) -> Any:
    """The `table` method of the layer's rotation; None if it has none or does not rotate whole heads of `width`."""
    rotary = getattr(options.rotary, "rotary", None)
    return getattr(rotary, "table", None) if getattr(rotary, "head_dim", None) == width else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs
) -> tuple[Tensor, KernelState | None, Tail | None]:
    """Same arguments and results as `chunked.attend`, in bfloat16 or float32; no state if `inputs` ask for none.

    With exponential maps, queries can be lost: see `kernel_attention.triton.attend`.
    """
    if decode.unsupported(q, k, v, inputs) is None:
        return decode.step(q, k, v, inputs)
    options, weights = inputs.options, inputs.weights
    make_table = None if options.near_rotary is None else angle_table(options, q.shape[-1])
    reach = options.block_size * options.blocks
    table = None if make_table is None else make_table(0, reach + ANGLES, q.device)
    far_weight = weights.far_weight if inputs.gate is None else None
    queries = FlurkaQueryTensors(q, inputs.gate, weights.gate_weight, far_weight, table)
    static, keys = options_and_keys(q, k, v, inputs)
    results = flurka_operator(static, queries, keys, *inputs.of_sequence)
    return outputs_and_state(results, q, k, v, inputs)


def options_and_keys(
    q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs
) -> tuple[FlurkaStatic, FlurkaKeyTensors]:
    """The operator's options, and its tensors of keys."""
    options, weights, tail = inputs.options, inputs.weights, inputs.tail
    sizes = {"block_size": options.block_size, "blocks": options.blocks}
    tables = block_tables(inputs.positions, q, **sizes, tail=tail is not None)
    keys, values = k, v
    if tail is not None and tables.before:
        keys, values = torch.cat([tail.keys, k], 2), torch.cat([tail.values, v], 2)
    feature_map = named(options.feature_map)
    static = FlurkaStatic(
        feature_map=feature_map.name,
        components=feature_map.components,
        near=options.near,
        blocks=options.blocks,
        start=tables.start,
        before=tables.before,
        oldest=tables.oldest,
        trains=torch.is_grad_enabled(),
    )
    return static, FlurkaKeyTensors(
        keys,
        values,
        weights.pool_keys.to(torch.float32),
        weights.pool_values.to(torch.float32),
        projection=dense(weights.projection, q.shape[-1]),
        log_decay=inputs.log_decay,
        far_mass=weights.far_mass,
        starts=tables.starts,
        windows=tables.windows,
        ends=tables.ends,
    )


def outputs_and_state(
    results: tuple[Any, KernelState | None, KernelState | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: FlurkaInputs,
) -> tuple[Tensor, KernelState | None, Tail | None]:
    """What `attend` returns, from the operator's results; lost queries are computed again."""
    (outputs, first, last), options, tail = results, inputs.options, inputs.tail
    reach, next_tail = options.block_size * options.blocks, None
    if inputs.return_state:
        next_tail = (empty_tail(k, v, reach) if tail is None else tail).after(k, v)
    # If a softmax window shares its normalizer with the landmarks, the weights add up to at least 1.
    may_lose = options.near == "kernel" or inputs.gate is not None
    if not kernels_check(options.feature_map, may_lose, q, inputs.log_decay is not None):
        return outputs.out, last, next_tail
    lost = outputs.factor == 0
    if inputs.gate is not None:
        at = token_positions(inputs.positions, q.shape[2], q.device)
        lost &= sees_far(at, options.block_size, options.blocks)[:, None]

    def recompute() -> Tensor:
        # With an exchange, `first` is the state that came from the other ranks.
        exact = inputs._replace(far=first or inputs.far, exchange=None)
        return chunked.attend(q.double(), k.double(), v.double(), exact)[0]

    return recompute_lost((outputs.out, lost), recompute), last, next_tail


BLOCKS_AT_ONCE = 16
"""Blocks per program that sums gradients of E and F."""


class FlurkaLaunches(NamedTuple):
    """Implements `kernels.protocol.Launches`."""

    launcher: Launcher
    """Sizes of the launches over landmarks."""

    near: NearParams
    seq: SequenceInfo
    queries: Rows
    window: Window
    pools: Pools
    merge_params: MergeParams
    matrix: Matrix
    """The projection in the dtype of landmarks, float32."""

    projection: Tensor | None
    stores_spread: bool
    """Whether outputs have a spread: for backward, unless the map is unbounded, which needs more digits."""

    @staticmethod
    def of(static: FlurkaStatic, q: Tensor, tensors: FlurkaKeyTensors) -> "FlurkaLaunches":
        """Launches for queries q (B, H, N, d), without what `with_merge` adds."""
        k, v, pool_keys, pool_values, projection, log_decay, far_mass, starts, windows, ends = tensors
        rank, block_size = pool_keys.shape[-2:]
        heads, length = k.shape[1], k.shape[2] - static.before
        phi = map_of_call(static, q, projection, log_decay is not None)
        near = NearParams(static.near == "softmax", False, False, static.blocks, block_size, q.shape[-1])
        landmarks = cdiv(length, block_size) * rank
        capability = capability_of(q.device)
        segment = segment_blocks(phi, block_size, rank) * block_size
        decay = None
        if log_decay is not None:
            places = ends_of_blocks(ends, length, block_size, q.device)
            decay = Decay.of_blocks(log_decay, segment, places, rank)
        seq = SequenceInfo(starts, static.start, ends, heads, length, q.shape[2], landmarks, decay)
        launcher = Launcher(
            phi=phi,
            seq=seq._replace(starts=None, ends=None, decay=None),
            segment=segment,
            group=q.shape[1] // heads,
            values=v.shape[-1],
            keys=0,
            causal=True,
            dtype=v.dtype,
            capability=capability,
            tiles=tuple(tile_sizes(phi, near, v.element_size(), v.shape[-1], capability).items()),
            block_size=block_size,
            rank=rank,
        )
        pools = Pools(
            pool_keys.contiguous(),
            pool_values.contiguous(),
            head=pool_keys[0].numel() if pool_keys.dim() == 3 else 0,
            far_mass=None if far_mass is None else far_mass.contiguous(),
        )
        return FlurkaLaunches(
            launcher=launcher,
            near=near,
            seq=seq,
            queries=Rows.of(q),
            window=Window(Rows.of(k), Rows.of(v), windows, None, static.before, static.oldest),
            pools=pools,
            merge_params=MergeParams(None, None, None),
            matrix=Matrix.of(projection, heads),
            projection=projection,
            stores_spread=static.trains and not phi.unbounded,
        )

    def with_merge(self, queries: FlurkaQueryTensors) -> "FlurkaLaunches":
        """These launches with the gate or far weight of the merge, and the angles of the window."""
        params = (queries.gate, queries.gate_weight, queries.far_weight)
        return self._replace(
            near=self.near._replace(gated=queries.gate is not None, rotary=queries.table is not None),
            window=self.window._replace(table=queries.table),
            merge_params=MergeParams(*(None if x is None else x.contiguous() for x in params)),
        )

    def launch_pool(self, kernel: Any, batch: int, each: int, *arguments: Any, **options: Any) -> None:
        """Launch a pooling kernel with one program per `each` blocks of a key head."""
        programs = batch * self.seq.heads * cdiv(self.seq.keys // self.launcher.rank, each)
        options |= {"NEAR": self.near, "RP": padded(self.launcher.rank), "BP": padded(self.near.block_size)}
        self.launcher.launch(kernel, batch, self.window, *arguments, grid=programs, **options)

    def write(self) -> tuple[State, SavedLandmarks]:
        """See `Launches`."""
        k, saved = self.window.keys.pointer, self.key_buffers()
        buffer = self.launcher.segment_buffer(k, self.seq.length)
        self.matrix.fill(saved.terms)
        landmarks = (saved.landmarks, saved.values, saved.token_count)
        self.launch_pool(pool_kernels.pool, len(k), 1, self.pools, self.seq, *landmarks)
        inputs = (saved.keys, self.matrix, buffer, self.seq, None)
        self.launcher.launch(kernels.write_keys, len(k), *inputs, grid=Grid.KEY_SEGMENTS)
        return buffer, saved

    def output_buffers(self, queries: FlurkaQueryTensors) -> FlurkaOutputs:
        """Buffers for what `read` returns."""
        q, v = queries.q, self.window.v.pointer
        factor = q.new_empty(q.shape[:3], dtype=torch.float32)
        unbounded = self.launcher.phi.unbounded
        return FlurkaOutputs(
            out=output_buffer(q, v),
            spread=v.new_empty(*q.shape[:3], v.shape[-1]) if self.stores_spread else v.new_empty(0),
            factor=factor,
            lse=factor.new_empty(q.shape[:3] if self.near.softmax else 0),
            scale=factor.new_empty(len(q), self.seq.heads, q.shape[2] if unbounded else 0),
            share=factor.new_empty(0 if queries.gate is not None else q.shape[:3]),
            logit=factor.new_empty(0 if queries.gate_weight is None else q.shape[:3]),
        )

    def key_buffers(self) -> SavedLandmarks:
        """Buffers for the landmarks."""
        v, phi = self.window.v.pointer, self.launcher.phi
        lead = (len(v), self.seq.heads, self.seq.keys)
        token_count = v.new_empty(lead, dtype=torch.float32)
        return SavedLandmarks(
            landmarks=token_count.new_empty(*lead, self.near.width),
            values=v.new_empty(*lead, self.launcher.values),
            features=v.new_empty(*lead, phi.padded_features),
            feature_logs=token_count.new_empty(lead if phi.unbounded else 0),
            token_count=token_count,
            terms=self.matrix.buffer(self.projection, v),
        )

    def merged(self, outputs: FlurkaOutputs) -> Merged:
        """The outputs' numbers as an argument of kernels."""
        return Merged(
            factor=outputs.factor,
            lse=outputs.lse if self.near.softmax else None,
            scale=outputs.scale if self.launcher.phi.unbounded else None,
            share=None if self.near.gated else outputs.share,
            logit=None if self.merge_params.gate_weight is None else outputs.logit,
        )

    def rows_of_spread(self, spread: Tensor) -> Rows | None:
        """The spread as an argument of kernels."""
        return Rows.of(spread) if self.stores_spread else None

    def merge_inputs(self, queries: Rows | Queries, saved: SavedLandmarks, state: State) -> tuple[Any, ...]:
        """The first arguments of both kernels over queries."""
        matrix = self.matrix.split(saved.terms)
        return queries, self.window, saved.keys, matrix, state, self.seq, self.merge_params

    def ahead(self) -> tuple[int, Launcher]:
        """The queries of a sequence that are computed while states are exchanged, and the launcher for them."""
        q, launcher = self.queries.pointer, self.launcher
        count = queries_ahead(len(q), q.shape[1], q.shape[2], launcher.segment)
        return count, launcher._replace(seq=launcher.seq._replace(queries=count))

    def read_ahead(self, queries: FlurkaQueryTensors, saved: SavedLandmarks) -> WindowSums:
        """See `Launches`: the windows of the first queries."""
        launches, (count, launcher) = self.with_merge(queries), self.ahead()
        lead = (*queries.q.shape[:2], count)
        near = queries.q.new_empty(*lead, launcher.values, dtype=torch.float32)
        ahead = WindowSums(near, near.new_empty(lead), near.new_empty(lead), count)
        matrix = self.matrix.split(saved.terms)
        inputs = (self.queries, launches.window, matrix, self.seq._replace(queries=count))
        kernel, batch, grid = merge_kernels.window_forward, len(queries.q), Grid.QUERY_TILES
        launcher.launch(kernel, batch, *inputs, ahead, grid=grid, NEAR=launches.near)
        return ahead

    def read(
        self,
        queries: FlurkaQueryTensors,
        saved: SavedLandmarks,
        state: State,
        ahead: WindowSums | None = None,
    ) -> FlurkaOutputs:
        """See `Launches`."""
        launches, outputs = self.with_merge(queries), self.output_buffers(queries)
        inputs = launches.merge_inputs(self.queries, saved, state)
        spread = self.rows_of_spread(outputs.spread)
        buffers = (Rows.to_write(outputs.out), spread, launches.merged(outputs), ahead)
        kernel, batch, grid = merge_kernels.merge, len(queries.q), Grid.QUERY_TILES
        self.launcher.launch(kernel, batch, *inputs, *buffers, grid=grid, NEAR=launches.near)
        return outputs

    def bwd_read(
        self,
        do: Tensor,
        queries: FlurkaQueryTensors,
        saved: Saved,
        dq: Tensor,
        needs_projection: bool,
        *,
        exchanges: bool = False,
    ) -> QueryBackward:
        """See `Launches`."""
        q, launcher, outputs = queries.q, self.launcher, saved.outputs
        launches = self.with_merge(queries)
        merged = launches.merged(outputs)
        if merged.logit is not None:
            params = launches.merge_params._replace(gate=merged.logit)
            launches = launches._replace(merge_params=params)
        means, delta = torch.empty_like(merged.factor), torch.empty_like(merged.factor)
        # `window_dq` multiplies what `merge_backward` stores of the gate's gradient, which must not be rounded before.
        gate_dtype = torch.float32 if queries.gate is None else queries.gate.dtype
        is_exact = exchanges and queries.gate_weight is not None
        dmerge = torch.empty_like(merged.factor, dtype=torch.float32 if is_exact else gate_dtype)
        tokens = Tokens(self.queries, *launcher.feature_buffers(q))
        bwd_queries = Queries(tokens, Rows.of(do), merged.factor, delta, merged.scale)
        dproj = self._projected(q) if needs_projection else None
        inputs = launches.merge_inputs(bwd_queries, saved.keys, saved.state)
        of_forward = (merged, Rows.of(outputs.out), self.rows_of_spread(outputs.spread))
        later, finish_dq = None, None
        # Under phi, the gradients of a query's features through window and landmarks are one sum.
        if exchanges and self.near.softmax:
            later, of_first = self.ahead()
            matrix, seq = self.matrix.split(saved.keys.terms), self.seq._replace(queries=later)
            finish_dq = partial(
                of_first.launch,
                *(merge_kernels.window_dq, len(do), self.queries, launches.window, matrix, seq),
                *(launches.merge_params, merged, bwd_queries.grad, merged.factor, means, dmerge),
                Rows.to_write(dq),
                grid=Grid.QUERY_TILES,
                NEAR=launches.near,
            )
        arguments = (len(do), *inputs, *of_forward, Rows.to_write(dq), dproj, means, dmerge, later)
        grid = Grid.QUERY_TILES
        launcher.launch(merge_kernels.merge_backward, *arguments, grid=grid, NEAR=launches.near)
        if launcher.stores_features:
            # From here on, only their features are read.
            bwd_queries = bwd_queries._replace(tokens=tokens._replace(rows=None))
        grads, dfar_weight = FlurkaQueryTensors(dq), None
        if queries.gate is None:
            dfar_weight = dmerge.sum((0, 2))
            if queries.far_weight is not None:
                grads = grads._replace(far_weight=dfar_weight)
        else:
            grads = grads._replace(gate=dmerge.to(gate_dtype))
        if queries.gate_weight is not None:
            products = products_of_tokens(dmerge.to(q.dtype)[..., None], q, q.shape[1])
            grads = grads._replace(gate_weight=products[:, 0].to(queries.gate_weight.dtype))
        projection_grad = later_products(dproj, q, self.seq.heads)
        op_saved = _MergeBackward(launches, merged, means, dmerge, dfar_weight)
        return QueryBackward(bwd_queries, grads, projection_grad, op_saved, finish_dq)

    def sum_queries(self, queries: Queries, length: int) -> State:
        """See `Launches`."""
        return sum_queries(self.launcher, queries, self.seq, self.window.keys.pointer, length)

    def bwd_write(
        self,
        query_backward: QueryBackward,
        saved: SavedLandmarks,
        states: StatesBackward,
        dk: Tensor,
        dv: Tensor,
    ) -> FlurkaKeyTensors:
        """See `Launches`."""
        queries, merge = query_backward.queries, query_backward.op_saved
        launches, needs_projection = merge.launches, query_backward.projection_grad is not None
        matrix, launcher, seq, k = self.matrix.split(saved.terms), self.launcher, self.seq, self.k
        batch, of_landmarks = len(k), self.landmark_gradients(query_backward, saved, states)
        dproj_k = self._projected(k) if needs_projection and not self.near.softmax else None
        pool_summands = tuple(saved.landmarks.new_empty(2, *k.shape[:3], launcher.rank))
        launcher.launch(
            window_kernels.window_backward,
            *(batch, self.queries, launches.window, self.pools, matrix, seq),
            *(launches.merge_params, merge.merged, queries.grad, merge.means),
            *(of_landmarks.keys, of_landmarks.values, pool_summands),
            *(Rows.to_write(dk), Rows.to_write(dv), dproj_k),
            grid=cdiv(k.shape[2], launcher.tile_sizes("window_backward").chunk) * batch * seq.heads,
            NEAR=launches.near,
        )
        grads = FlurkaKeyTensors(dk, dv, *self._pool_gradients(launches, pool_summands))
        products = [] if dproj_k is None else [products_of_tokens(dproj_k, k, seq.heads)]
        sums = (merge.dmerge, merge.dfar_weight)
        return self.with_far_gradients(grads, query_backward, saved, states, of_landmarks, sums, products)

    @property
    def k(self) -> Tensor:
        """Keys, beginning with the tail's."""
        k: Tensor = self.window.keys.pointer
        return k

    def landmark_gradients(
        self, query_backward: QueryBackward, saved: SavedLandmarks, states: StatesBackward
    ) -> "LandmarkGradients":
        """The gradients of landmarks, by the kernel of keys."""
        landmarks, needs_projection = saved.landmarks, query_backward.projection_grad is not None
        grads = LandmarkGradients(
            torch.empty_like(landmarks),
            landmarks.new_empty(*landmarks.shape[:3], self.launcher.values),
            # In the dtype of values and keys, whose matrix products are faster than those of float32 landmarks.
            self._projected(saved.values) if needs_projection else None,
            None if self.seq.decay is None else torch.empty_like(saved.token_count),
        )
        inputs = (query_backward.queries, saved.keys, self.matrix, states.of_queries, self.seq)
        rows = Rows.to_write(grads.keys), Rows.to_write(grads.values)
        bwd_dkv(self.launcher, len(landmarks), inputs, (*rows, grads.projected, grads.token_count, None))
        return grads

    def with_far_gradients(
        self,
        grads: Any,
        query_backward: QueryBackward,
        saved: SavedLandmarks,
        states: StatesBackward,
        of_landmarks: "LandmarkGradients",
        merge: tuple[Tensor, Tensor | None],
        products: list[Tensor],
    ) -> Any:
        """`grads` with those of the projection, of beta and of the decay.

        merge: the gradients of the gate's logits, or the parts of gamma's gradient, and that gradient; None with a
        gate. products: the parts of the projection's gradient that are not of queries or landmarks.
        """
        landmarks, launcher, seq, k = saved.landmarks, self.launcher, self.seq, self.k
        dmerge, dfar_weight = merge
        if query_backward.projection_grad is not None and self.projection is not None:
            assert of_landmarks.projected is not None
            tokens = landmarks.to(k.dtype)
            products = [*products, products_of_tokens(of_landmarks.projected, tokens, seq.heads)]
            of_queries = query_backward.projection_grad()
            grads = grads._replace(projection=gradient_of_projection(self.projection, of_queries, *products))
        if self.pools.far_mass is not None:
            # exp(beta) scales all of a state except the first state's part, so its gradient is that of the states' log
            # scale; for states that queries read, that is the gradient of gamma. Sums over landmarks would give the
            # same, but from numbers that were rounded more often and may nearly cancel.
            dfar_mass = landmarks.new_zeros(seq.heads)
            if dfar_weight is not None:
                dfar_mass += dfar_weight.view(seq.heads, -1).sum(1)
            if states.last is not None:
                dfar_mass += states.last.scale_grad().sum(0)
            if states.first is not None:
                dfar_mass -= states.first.scale_grad().sum(0)
            grads = grads._replace(far_mass=dfar_mass)
        if of_landmarks.token_count is not None:
            of_blocks = (
                (of_landmarks.token_count * saved.token_count).unflatten(2, (-1, launcher.rank)).sum(3)
            )
            # Under a gate, the weights of landmarks add up to 1, and the gradient of their scale is 0.
            of_merge = None
            if dfar_weight is not None:
                of_merge = dmerge.unflatten(1, (seq.heads, -1)).sum(2)
            # Blocks without an end contribute 0, so any place will do.
            ends = ends_of_blocks(seq.ends, seq.length, self.near.block_size, k.device)
            at = ends.clamp(min=0).to(torch.int64)[:, None].expand_as(of_blocks)
            of_ends = of_blocks.new_zeros(*of_blocks.shape[:2], seq.length).scatter_add_(2, at, of_blocks)
            sums = (of_ends, of_merge, *states.of_entering)
            dlog_decay = gradient_of_decay(*sums, seq, launcher.segment, decay_after_read=True)
            grads = grads._replace(log_decay=dlog_decay)
        return grads

    def _pool_gradients(
        self, launches: "FlurkaLaunches", pool_summands: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of E and F, from the summands of `window_backward`."""
        seq, pools, batch = self.seq, self.pools.of_keys, len(pool_summands[0])
        parts = cdiv(seq.keys // self.launcher.rank, BLOCKS_AT_ONCE)
        dpools = pool_summands[0].new_empty(2, batch, seq.heads, parts, *pools.shape[-2:])
        inputs = (batch, BLOCKS_AT_ONCE, seq, pool_summands, *dpools)
        # `pool_backward` does not read the tokens.
        without_tokens = launches._replace(window=launches.window._replace(keys=None, v=None))
        without_tokens.launch_pool(pool_kernels.pool_backward, *inputs, EACH=BLOCKS_AT_ONCE)
        dpool_keys, dpool_values = (part.sum((0, 2) if pools.dim() == 3 else (0, 1, 2)) for part in dpools)
        return dpool_keys, dpool_values

    def _projected(self, tokens: Tensor) -> Tensor:
        """A buffer for the gradients of projected tokens."""
        return tokens.new_empty(*tokens.shape[:3], self.launcher.phi.rows)


class LandmarkGradients(NamedTuple):
    """Gradients of the landmarks."""

    keys: Tensor
    """(B, H_kv, blocks r, d) float32."""

    values: Tensor
    """(B, H_kv, blocks r, D) float32."""

    projected: Tensor | None
    """Of projected landmarks, (B, H_kv, blocks r, M)."""

    token_count: Tensor | None
    """(B, H_kv, blocks r), for decaying states."""


class _MergeBackward(NamedTuple):
    """What `bwd_write` takes from `bwd_read`."""

    launches: FlurkaLaunches
    """With the merge, whose gate has the queries' part."""

    merged: Merged
    means: Tensor
    """See `window_kernels`, (B, H, N) float32."""

    dmerge: Tensor
    """Gradients (B, H, N) of the gate's logits, or the parts of gamma's gradient."""

    dfar_weight: Tensor | None
    """Gradient of gamma (H,); None with a gate."""


flurka_operator = Operator(
    "flurka_attention",
    Op(FlurkaQueryTensors, FlurkaKeyTensors, FlurkaStatic, FlurkaOutputs, SavedLandmarks, FlurkaLaunches.of),
)
"""FLuRKA of these tensors and an initial state."""
