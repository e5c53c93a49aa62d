"""FLuRKA's launches, registered as a differentiable PyTorch operator.

Landmarks are keys of `kernel_attention`'s kernels, which sum them, scan their states and compute their gradients.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.flurka_attention import merge_kernels, pool_kernels, window_kernels
from megakernel.ops.flurka_attention.arguments import Merged, MergeParams, Near, Pools, Window
from megakernel.ops.flurka_attention.block_tables import ends_of_blocks
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import kernels, key_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Rows, SequenceInfo, State, Tokens
from megakernel.ops.kernel_attention.decay import Decay, gradient_of_decay
from megakernel.ops.kernel_attention.differentiable import Operator
from megakernel.ops.kernel_attention.exchanged import QueryBackward, Saved, StatesBackward
from megakernel.ops.kernel_attention.launches import (
    SEGMENT,
    SHAPES_REMEMBERED,
    Launcher,
    TileSizes,
    map_of_call,
    output_buffer,
)
from megakernel.ops.kernel_attention.operators import gradient_of_matrix, products_of_tokens
from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES
from megakernel.ops.kernels.features import Phi, cdiv, padded
from megakernel.ops.kernels.launch import capability_of

MIN_LANDMARKS = 64
"""Fewest landmarks per segment: fewer would not fill matrix products of tiles."""

BLOCKS_AT_ONCE = 16
"""Blocks per program that sums gradients of E and F."""


def segment_blocks(phi: Phi, block_size: int, rank: int) -> int:
    """Blocks per segment: at least as many tokens as in kernel attention, and at least MIN_LANDMARKS landmarks."""
    tokens = SEGMENT * max(1, phi.padded_features // 64)
    return max(cdiv(tokens, block_size), cdiv(MIN_LANDMARKS, rank))


@lru_cache(SHAPES_REMEMBERED)
def tile_sizes(phi: Phi, near: Near, size: int, values: int, capability: int) -> Mapping[str, TileSizes]:
    """Tile sizes of FLuRKA's kernels, for elements of `size` bytes."""
    tiles = dict.fromkeys(("pool", "pool_backward"), TileSizes(16, 16, 4))
    has_wgmma = capability in WGMMA_CAPABILITIES
    if size == 4:
        names = ("merge", "merge_backward", "window_backward", "write_keys", "bwd_dkv")
        return tiles | dict.fromkeys(names, TileSizes(32, 32, 4))
    if max(phi.padded_width, padded(values), phi.padded_features // 2) <= 64:
        window = TileSizes(64, 64, 4, 2 if has_wgmma else 1) if near.softmax else TileSizes(64, 32, 4)
        return tiles | {
            **dict.fromkeys(("merge", "merge_backward", "write_keys"), TileSizes(64, 64, 4)),
            "window_backward": window,
            "bwd_dkv": TileSizes(64, 32, 4, 3 if has_wgmma else 1),
        }
    tiles |= {"write_keys": TileSizes(64, 64, 4), "bwd_dkv": TileSizes(64, 32, 4 if has_wgmma else 8)}
    if phi.unbounded and not has_wgmma:
        tiles["bwd_dkv"] = TileSizes(32, 32, 8)
    of_queries = ("merge", "merge_backward", "window_backward")
    if has_wgmma and near.softmax:
        return tiles | dict.fromkeys(of_queries, TileSizes(64, 32, 4))
    tiles |= dict.fromkeys(of_queries, TileSizes(32, 32, 8))
    return tiles | {"window_backward": TileSizes(64, 32, 8)} if near.softmax else tiles


class FlurkaLaunches(NamedTuple):
    """Implements `kernel_attention.exchanged.Launches`.

    Tensors of keys are k, v, matrix, log_decay, pool_keys, pool_values, far_mass, starts, windows and ends; those of
    queries are q, gate, gate_weight, far_weight and table.
    """

    launcher: Launcher
    """Sizes of the launches over landmarks."""

    near: Near
    seq: SequenceInfo
    queries: Rows
    window: Window
    pools: Pools
    shares: MergeParams
    matrix: Matrix
    """The projection in the dtype of landmarks, float32."""

    matrix_parameter: Tensor | None
    stores_spread: bool
    """Whether outputs have a spread: for backward, unless the map is unbounded, which needs more digits."""

    @staticmethod
    def of(options: Sequence[Any], q: Tensor, tensors: Tensors) -> "FlurkaLaunches":
        """Launches without what `with_merge` adds. options: the values of OPTIONS."""
        _, _, near_kind, blocks, start, before, oldest, trains = options
        k, v, matrix, log_decay, pool_keys, pool_values, far_mass, starts, windows, ends = tensors
        rank, block_size = pool_keys.shape[-2:]
        heads, length = k.shape[1], k.shape[2] - before
        phi = map_of_call(options, q, tensors)
        near = Near(near_kind == "softmax", False, False, blocks, block_size, q.shape[-1])
        landmarks = cdiv(length, block_size) * rank
        capability = capability_of(q.device)
        segment = segment_blocks(phi, block_size, rank) * block_size
        decay = None
        if log_decay is not None:
            places = ends_of_blocks(ends, length, block_size, q.device)
            decay = Decay.of_blocks(log_decay, segment, places, rank)
        seq = SequenceInfo(starts, start, ends, heads, length, q.shape[2], landmarks, decay)
        launcher = Launcher(
            *(phi, seq._replace(starts=None, ends=None, decay=None), segment, q.shape[1] // heads),
            *(v.shape[-1], 0, True, v.dtype, capability, block_size, rank),
            tuple(tile_sizes(phi, near, v.element_size(), v.shape[-1], capability).items()),
        )
        pool_stride = pool_keys[0].numel() if pool_keys.dim() == 3 else 0
        return FlurkaLaunches(
            launcher,
            near,
            seq,
            Rows.of(q),
            Window(Rows.of(k), Rows.of(v), windows, None, before, oldest),
            Pools(
                pool_keys.contiguous(),
                pool_values.contiguous(),
                pool_stride,
                None if far_mass is None else far_mass.contiguous(),
            ),
            MergeParams(None, None, None),
            Matrix.of(matrix, heads),
            matrix,
            trains and not phi.unbounded,
        )

    def with_merge(self, queries: Tensors) -> "FlurkaLaunches":
        """These launches with the gate or far weight of the merge, and the angles of the window."""
        _, gate, gate_weight, far_weight, table = queries
        return self._replace(
            near=self.near._replace(gated=gate is not None, rotary=table is not None),
            window=self.window._replace(table=table),
            shares=MergeParams(
                *(None if x is None else x.contiguous() for x in (gate, gate_weight, far_weight))
            ),
        )

    def launch(self, kernel: Any, batch: int, *arguments: Any, **options: Any) -> None:
        """Launch one of FLuRKA's own kernels."""
        self.launcher.launch(kernel, batch, *arguments, NEAR=self.near, **options)

    def launch_pool(self, kernel: Any, batch: int, each: int, *arguments: Any, **options: Any) -> None:
        """Launch a pooling kernel with one program per `each` blocks of a key head."""
        programs = batch * self.seq.heads * cdiv(self.seq.keys // self.launcher.rank, each)
        sizes = {"RP": padded(self.launcher.rank), "BP": padded(self.near.block_size)}
        self.launch(kernel, batch, self.window, *arguments, programs=programs, **sizes, **options)

    def write(self) -> tuple[State, Tensors]:
        """The sums over the landmarks of each segment, and the landmarks."""
        k, saved = self.window.keys.pointer, self.key_buffers()
        buffer = self.launcher.segment_buffer(k, self.seq.length)
        self.matrix.fill(saved.terms)
        self.launch_pool(pool_kernels.pool, len(k), 1, self.pools, self.seq, *saved[:2], saved.token_count)
        self.launcher.launch(kernels.write_keys, len(k), saved.keys, self.matrix, buffer, self.seq, None)
        return buffer, saved

    def output_buffers(self, queries: Tensors) -> Tensors:
        """Buffers for outputs, their spread and the fields of `Merged`; empty for what is None."""
        (q, gate, gate_weight, *_), v = queries, self.window.v.pointer
        factor = q.new_empty(q.shape[:3], dtype=torch.float32)
        return (
            output_buffer(q, v),
            v.new_empty(*q.shape[:3], v.shape[-1]) if self.stores_spread else v.new_empty(0),
            factor,
            factor.new_empty(q.shape[:3] if self.near.softmax else 0),
            factor.new_empty(len(q), self.seq.heads, q.shape[2] if self.launcher.phi.unbounded else 0),
            factor.new_empty(0 if gate is not None else q.shape[:3]),
            factor.new_empty(0 if gate_weight is None else q.shape[:3]),
        )

    def key_buffers(self) -> "_SavedLandmarks":
        """Buffers for the landmarks."""
        v, phi = self.window.v.pointer, self.launcher.phi
        lead = (len(v), self.seq.heads, self.seq.keys)
        token_count = v.new_empty(lead, dtype=torch.float32)
        return _SavedLandmarks(
            token_count.new_empty(*lead, self.near.width),
            v.new_empty(*lead, self.launcher.values),
            v.new_empty(*lead, phi.padded_features),
            token_count.new_empty(lead if phi.unbounded else 0),
            token_count,
            self.matrix.buffer(v.dtype, v),
        )

    def empty_queries(self, q: Tensor) -> Tensors:
        """See `kernel_attention.exchanged.Launches`."""
        return q, None, None, None, None

    def merged(self, factor: Tensor, lse: Tensor, scale: Tensor, share: Tensor, logit: Tensor) -> Merged:
        """These tensors as an argument of kernels."""
        return Merged(
            factor,
            lse if self.near.softmax else None,
            scale if self.launcher.phi.unbounded else None,
            None if self.near.gated else share,
            None if self.shares.gate_weight is None else logit,
        )

    def rows_of_spread(self, spread: Tensor) -> Rows | None:
        """The spread as an argument of kernels."""
        return Rows.of(spread) if self.stores_spread else None

    def merge_inputs(self, queries: Rows | Queries, saved: Tensors, state: State) -> tuple[Any, ...]:
        """The first arguments of both kernels over queries."""
        landmarks = _SavedLandmarks(*saved)
        matrix = self.matrix.split(landmarks.terms)
        return queries, self.window, landmarks.keys, matrix, state, self.seq, self.shares

    def read(self, queries: Tensors, saved: Tensors, state: State) -> Tensors:
        """Outputs, their spread and the fields of `Merged`."""
        launches = self.with_merge(queries)
        out, spread, *merged = self.output_buffers(queries)
        inputs = launches.merge_inputs(self.queries, saved, state)
        outputs = (Rows.to_write(out), self.rows_of_spread(spread), launches.merged(*merged))
        launches.launch(merge_kernels.merge, len(out), *inputs, *outputs)
        return out, spread, *merged

    def bwd_read(self, grad: Tensor, queries: Tensors, saved: Saved, needs_matrix: bool) -> QueryBackward:
        """See `kernel_attention.exchanged.Launches`."""
        (q, gate, gate_weight, far_weight, _), launcher = queries, self.launcher
        launches = self.with_merge(queries)
        out, spread, *numbers = saved.queries
        merged = launches.merged(*numbers)
        if merged.logit is not None:
            launches = launches._replace(shares=launches.shares._replace(gate=merged.logit))
        means, delta = torch.empty_like(merged.factor), torch.empty_like(merged.factor)
        dmerge = torch.empty_like(merged.factor if gate is None else gate)
        tokens = Tokens(self.queries, *launcher.feature_buffers(q))
        bwd_queries = Queries(tokens, Rows.of(grad), merged.factor, delta, merged.scale)
        dq, dy = q.new_empty(q.shape), self._projected(q) if needs_matrix else None
        inputs = launches.merge_inputs(bwd_queries, saved.keys, saved.state)
        of_forward = (merged, Rows.of(out), self.rows_of_spread(spread))
        launches.launch(merge_kernels.merge_backward, len(grad), *inputs, *of_forward, dq, dy, means, dmerge)
        if launcher.stores_features:
            # From here on, only their features are read.
            bwd_queries = bwd_queries._replace(tokens=tokens._replace(rows=None))
        dfar_weight = dmerge.sum((0, 2)) if gate is None else None
        dgate_weight = None
        if gate_weight is not None:
            products = products_of_tokens(dmerge.to(q.dtype)[..., None], q, q.shape[1])
            dgate_weight = products[:, 0].to(gate_weight.dtype)
        dgate, dfar = None if gate is None else dmerge, None if far_weight is None else dfar_weight
        grads = (dq, dgate, dgate_weight, dfar, None)
        matrix_grad = None if dy is None else cache(partial(products_of_tokens, dy, q, self.seq.heads))
        return QueryBackward(bwd_queries, grads, matrix_grad, (launches, merged, means, dmerge, dfar_weight))

    def bwd_write(self, query_backward: QueryBackward, saved: Tensors, states: StatesBackward) -> Tensors:
        """Gradients of keys, values, projection, decays, E, F and beta."""
        queries, (launches, merged, means, dmerge, dfar_weight) = query_backward.queries, query_backward.rest
        saved_landmarks, needs_matrix = _SavedLandmarks(*saved), query_backward.matrix_grad is not None
        landmarks, matrix = saved_landmarks.landmarks, self.matrix.split(saved_landmarks.terms)
        launcher, seq, k, v = self.launcher, self.seq, self.window.keys.pointer, self.window.v.pointer
        batch = len(k)
        dlandmarks = torch.empty_like(landmarks)
        dpooled = landmarks.new_empty(*landmarks.shape[:3], launcher.values)
        # In the dtype of values and keys, whose matrix products are faster than those of float32 landmarks.
        dy_landmarks = self._projected(saved_landmarks.values) if needs_matrix else None
        dcounts = None if seq.decay is None else torch.empty_like(saved_landmarks.token_count)
        inputs = (queries, saved_landmarks.keys, self.matrix, states.of_queries, seq)
        outputs = (dlandmarks, dpooled, dy_landmarks, dcounts, None)
        for buffers in launcher.split_dkv(outputs):
            launcher.launch(key_kernels.bwd_dkv, batch, *inputs, *buffers)
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        dy_k = self._projected(k) if needs_matrix and not self.near.softmax else None
        pool_summands = tuple(landmarks.new_empty(2, *k.shape[:3], launcher.rank))
        launches.launch(
            window_kernels.window_backward,
            *(batch, self.queries, launches.window, self.pools, matrix, seq, launches.shares, merged),
            *(queries.grad, means, dlandmarks, dpooled, pool_summands, dk, dv, dy_k),
            programs=cdiv(k.shape[2], launcher.tile_sizes("window_backward").chunk) * batch * seq.heads,
        )
        parts = cdiv(seq.keys // launcher.rank, BLOCKS_AT_ONCE)
        pools = self.pools.of_keys
        dpools = landmarks.new_empty(2, batch, seq.heads, parts, *pools.shape[-2:])
        pool_inputs = (batch, BLOCKS_AT_ONCE, seq, pool_summands, *dpools)
        # `pool_backward` does not read the tokens.
        without_tokens = launches._replace(window=launches.window._replace(keys=None, v=None))
        without_tokens.launch_pool(pool_kernels.pool_backward, *pool_inputs, EACH=BLOCKS_AT_ONCE)
        dpool_keys, dpool_values = (part.sum((0, 2) if pools.dim() == 3 else (0, 1, 2)) for part in dpools)
        dmatrix = None
        if query_backward.matrix_grad is not None and self.matrix_parameter is not None:
            pairs = ((dy_k, k), (dy_landmarks, landmarks.to(k.dtype)))
            products = [products_of_tokens(dy, x, seq.heads) for dy, x in pairs if dy is not None]
            dmatrix = gradient_of_matrix(self.matrix_parameter, query_backward.matrix_grad(), *products)
        dfar_mass = None
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
        dlog_decay = None
        if dcounts is not None:
            of_blocks = (dcounts * saved_landmarks.token_count).unflatten(2, (-1, launcher.rank)).sum(3)
            # Under a gate, the weights of landmarks add up to 1, and the gradient of their scale is 0.
            of_queries = None
            if dfar_weight is not None:
                of_queries = dmerge.unflatten(1, (seq.heads, -1)).sum(2)
            # Blocks without an end contribute 0, so any place will do.
            ends = ends_of_blocks(seq.ends, seq.length, self.near.block_size, k.device)
            at = ends.clamp(min=0).to(torch.int64)[:, None].expand_as(of_blocks)
            of_ends = of_blocks.new_zeros(*of_blocks.shape[:2], seq.length).scatter_add_(2, at, of_blocks)
            sums = (of_ends, of_queries, *states.of_entering)
            dlog_decay = gradient_of_decay(*sums, seq, launcher.segment, decay_after_read=True)
        return dk, dv, dmatrix, dlog_decay, dpool_keys, dpool_values, dfar_mass, None, None, None

    def _projected(self, tokens: Tensor) -> Tensor:
        """A buffer for the gradients of projected tokens."""
        return tokens.new_empty(*tokens.shape[:3], self.launcher.phi.rows)


class _SavedLandmarks(NamedTuple):
    """Landmarks and what goes with them; unused tensors are empty."""

    landmarks: Tensor
    values: Tensor
    features: Tensor
    feature_logs: Tensor
    token_count: Tensor
    terms: Tensor
    """The split projection."""

    @property
    def keys(self) -> Keys:
        """The landmarks as keys of kernel attention's kernels."""
        logs = self.feature_logs if self.feature_logs.numel() else None
        tokens = Tokens(Rows.of(self.landmarks), self.features, logs)
        return Keys(tokens, Rows.of(self.values), self.token_count, None)


OPTIONS = {"feature_map": str, "components": int, "near": str}
OPTIONS |= dict.fromkeys(("blocks", "start", "before", "oldest"), int) | {"trains": bool}

attend = Operator(
    "flurka_attention", OPTIONS, FlurkaLaunches.of, queries=5, keys=10, saved=len(_SavedLandmarks._fields)
)
"""Takes the tensors of `FlurkaLaunches`, queries first, and an initial state."""
