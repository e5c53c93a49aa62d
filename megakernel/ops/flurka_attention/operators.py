"""The launches of FLuRKA as operators that PyTorch differentiates and compiles.

Landmarks are keys of `kernel_attention`'s kernels, which sum them up, pass their states on and give their gradients.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.flurka_attention import merge_kernels, pool_kernels, window_kernels
from megakernel.ops.flurka_attention.arguments import Merged, Near, Pools, Shares, Window
from megakernel.ops.flurka_attention.places import ends_of_blocks
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import kernels, key_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Rows, SequenceInfo, State, Tokens
from megakernel.ops.kernel_attention.decay import Decay, gradient_of_decay
from megakernel.ops.kernel_attention.differentiable import Operator
from megakernel.ops.kernel_attention.exchanged import QueryBackward, StateGradients
from megakernel.ops.kernel_attention.launches import SEGMENT, WARP_GROUPS, Call, TileSizes
from megakernel.ops.kernel_attention.operators import gradient_of_matrix, products_of_queries
from megakernel.ops.kernels.features import Phi, cdiv, padded, phi_of
from megakernel.ops.kernels.launch import capability_of

LANDMARKS = 64
"""Landmarks between two states, at least: fewer would not fill the products of tiles."""

BLOCKS_AT_ONCE = 16
"""Blocks whose parts of the gradients of E and F one program adds up."""


def segment_blocks(phi: Phi, block_size: int, rank: int) -> int:
    """Blocks between two states: at least the tokens that kernel attention takes, and LANDMARKS landmarks."""
    tokens = SEGMENT * max(1, phi.padded_features // 64)
    return max(cdiv(tokens, block_size), cdiv(LANDMARKS, rank))


def tiles_of(phi: Phi, near: Near, size: int, values: int, capability: int) -> dict[str, TileSizes]:
    """What programs of FLuRKA's kernels hold, of tokens of `size` bytes."""
    tiles = dict.fromkeys(("pool", "pool_backward"), TileSizes(16, 16, 4))
    if size == 4:
        names = ("merge", "merge_backward", "window_backward", "write_keys", "bwd_dkv")
        return tiles | dict.fromkeys(names, TileSizes(32, 32, 4))
    if max(phi.padded_width, padded(values), phi.padded_features // 2) <= 64:
        return tiles | {
            **dict.fromkeys(("merge", "merge_backward", "write_keys"), TileSizes(64, 64, 4)),
            **dict.fromkeys(("window_backward", "bwd_dkv"), TileSizes(64, 32, 4)),
        }
    has_groups = capability in WARP_GROUPS
    tiles |= {"write_keys": TileSizes(64, 64, 8), "bwd_dkv": TileSizes(64, 64 if has_groups else 32, 8)}
    if phi.unbounded and not has_groups:
        tiles["bwd_dkv"] = TileSizes(32, 32, 8)
    if not near.softmax:
        return tiles | dict.fromkeys(("merge", "merge_backward", "window_backward"), TileSizes(32, 32, 8))
    if not has_groups:
        return tiles | {
            **dict.fromkeys(("merge", "merge_backward"), TileSizes(32, 32, 8)),
            "window_backward": TileSizes(64, 32, 8),
        }
    return tiles | {
        **dict.fromkeys(("merge", "merge_backward"), TileSizes(128, 32, 8)),
        "window_backward": TileSizes(64, 32, 4),
    }


class FlurkaLaunches(NamedTuple):
    """See `kernel_attention.exchanged.Launches`.

    Tensors of keys are k, v, matrix, pool_keys, pool_values, far_mass, log_decay, starts, windows and ends; of queries
    q, gate, far_weight and table.
    """

    call: Call
    """Of the landmarks."""

    near: Near
    seq: SequenceInfo
    queries: Rows
    window: Window
    pools: Pools
    shares: Shares
    whole: Matrix
    """The projection in the dtype of landmarks, float32."""

    given_matrix: Tensor | None

    @staticmethod
    def of(form: Sequence[Any], q: Tensor, tensors: Tensors) -> "FlurkaLaunches":
        """form: the values of OPTIONS. Without what `merging` says."""
        feature_map, components, kind, window_blocks, start, before, oldest = form
        k, v, matrix, pool_keys, pool_values, far_mass, log_decay, starts, windows, ends = tensors
        rank, block_size = pool_keys.shape[-2:]
        heads, length = k.shape[1], k.shape[2] - before
        rows = None if matrix is None else matrix.shape[-2]
        phi = phi_of(FeatureMap(feature_map, components), q.shape[-1], rows, log_decay is not None)
        near = Near(kind == "softmax", False, False, window_blocks, block_size, q.shape[-1])
        landmarks = cdiv(length, block_size) * rank
        capability = capability_of(q.device)
        segment = segment_blocks(phi, block_size, rank) * block_size
        decay = None
        if log_decay is not None:
            places = ends_of_blocks(ends, length, block_size, q.device)
            decay = Decay.of_blocks(log_decay, segment, places, rank)
        seq = SequenceInfo(starts, start, ends, heads, length, q.shape[2], landmarks, decay)
        call = Call(
            phi,
            seq._replace(starts=None, ends=None, decay=None),
            segment,
            q.shape[1] // heads,
            v.shape[-1],
            0,
            True,
            v.dtype,
            capability,
            block_size,
            rank,
            tiles_of(phi, near, v.element_size(), v.shape[-1], capability),
        )
        pool_stride = pool_keys[0].numel() if pool_keys.dim() == 3 else 0
        return FlurkaLaunches(
            call,
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
            Shares(None, None),
            Matrix.whole(matrix, heads),
            matrix,
        )

    def merging(
        self, gate: Tensor | None, far_weight: Tensor | None, table: Tensor | None
    ) -> "FlurkaLaunches":
        """The call with what outputs are merged by, and the angles of its window."""
        return self._replace(
            near=self.near._replace(gated=gate is not None, rotary=table is not None),
            window=self.window._replace(table=table),
            shares=Shares(*(None if x is None else x.contiguous() for x in (gate, far_weight))),
        )

    def start(self, kernel: Any, batch: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel of FLuRKA's own."""
        self.call.start(kernel, batch, *arguments, NEAR=self.near, **options)

    def start_pool(self, kernel: Any, batch: int, each: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel of pools, a program for `each` blocks of a key head."""
        programs = batch * self.seq.heads * cdiv(self.seq.keys // self.call.rank, each)
        sizes = {"RP": padded(self.call.rank), "BP": padded(self.near.block_size)}
        self.start(kernel, batch, self.window, *arguments, programs=programs, **sizes, **options)

    def write(self) -> tuple[State, Tensors]:
        """What the landmarks of each segment add, and the landmarks."""
        k, saved = self.window.keys.pointer, self.saved()
        buffer = self.call.sums_of_segments(k, self.seq.length)
        self.whole.fill(saved.terms)
        self.start_pool(pool_kernels.pool, len(k), 1, self.pools, self.seq, *saved[:2], saved.token_count)
        self.call.start(kernels.write_keys, len(k), saved.keys, self.whole, buffer, self.seq, None)
        return buffer, saved

    def found(self, queries: Tensors) -> Tensors:
        """A buffer for outputs and what `Merged` says of them; empty where that is None."""
        q, gate, *_ = queries
        factor = q.new_empty(q.shape[:3], dtype=torch.float32)
        return (
            self.window.v.pointer.new_empty(*q.shape[:3], self.call.values),
            factor,
            factor.new_empty(q.shape[:3] if self.near.softmax else 0),
            factor.new_empty(len(q), self.seq.heads, q.shape[2] if self.call.phi.unbounded else 0),
            factor.new_empty(0 if gate is not None else q.shape[:3]),
        )

    def saved(self) -> "_Saved":
        """A buffer for the landmarks."""
        v, phi = self.window.v.pointer, self.call.phi
        lead = (len(v), self.seq.heads, self.seq.keys)
        token_count = v.new_empty(lead, dtype=torch.float32)
        return _Saved(
            token_count.new_empty(*lead, self.near.width),
            v.new_empty(*lead, self.call.values),
            v.new_empty(*lead, phi.padded_features),
            token_count.new_empty(lead if phi.unbounded else 0),
            token_count,
            self.whole.buffer(v.dtype, v),
        )

    def no_queries(self, q: Tensor) -> Tensors:
        """See `kernel_attention.exchanged.Launches`."""
        return q, None, None, None

    def merged(self, factor: Tensor, lse: Tensor, scale: Tensor, share: Tensor) -> Merged:
        """The same as kernels take it."""
        near, unbounded = self.near, self.call.phi.unbounded
        rest = (lse if near.softmax else None, scale if unbounded else None, None if near.gated else share)
        return Merged(factor, *rest)

    def known(self, queries: Rows | Queries, saved: Tensors, state: State) -> tuple[Any, ...]:
        """What both kernels of queries are given first."""
        of_keys = _Saved(*saved)
        matrix = self.whole.split(of_keys.terms)
        return queries, self.window, of_keys.keys, matrix, state, self.seq, self.shares

    def read(self, queries: Tensors, saved: Tensors, state: State) -> Tensors:
        """Outputs and what `Merged` says of them."""
        launches = self.merging(*queries[1:])
        out, *rest = self.found(queries)
        known = launches.known(self.queries, saved, state)
        launches.start(merge_kernels.merge, len(out), *known, out, launches.merged(*rest))
        return out, *rest

    def bwd_read(
        self, grad: Tensor, queries: Tensors, found: Tensors, saved: Tensors, state: State, learned: bool
    ) -> QueryBackward:
        """See `kernel_attention.exchanged.Launches`."""
        (q, gate, far_weight, table), far = queries, self.call
        launches = self.merging(gate, far_weight, table)
        merged = launches.merged(*found)
        means, delta = torch.empty_like(merged.factor), torch.empty_like(merged.factor)
        change = torch.empty_like(merged.factor if gate is None else gate)
        tokens = Tokens(self.queries, *far.features(q, far.stored))
        known = Queries(tokens, Rows.of(grad), merged.factor, delta, merged.scale)
        dq, dy = q.new_empty(q.shape), self._projected(q) if learned else None
        given = (*launches.known(known, saved, state), merged)
        launches.start(merge_kernels.merge_backward, len(grad), *given, dq, dy, means, change)
        if far.stored:
            # Behind their features nobody reads them.
            known = known._replace(tokens=tokens._replace(rows=None))
        dfar_weight = change.sum((0, 2)) if gate is None else None
        grads = (dq, None if gate is None else change, None if far_weight is None else dfar_weight, None)
        of_matrix = None if dy is None else cache(partial(products_of_queries, dy, q, self.seq.heads))
        return QueryBackward(known, grads, of_matrix, (launches, merged, means, change, dfar_weight))

    def bwd_write(
        self,
        query_backward: QueryBackward,
        saved: Tensors,
        state: State,
        along: Tensor | None,
        last: StateGradients | None,
        first: StateGradients | None,
    ) -> Tensors:
        """Gradients of keys, values, projection, E, F, beta and the decay."""
        queries, (launches, merged, means, change, dfar_weight) = query_backward.queries, query_backward.rest
        of_keys, learned = _Saved(*saved), query_backward.of_matrix is not None
        landmarks, keys, matrix = of_keys.landmarks, of_keys.keys, self.whole.split(of_keys.terms)
        far, seq, k, v = self.call, self.seq, self.window.keys.pointer, self.window.v.pointer
        batch = len(k)
        dlandmarks, dpooled = (
            torch.empty_like(landmarks),
            landmarks.new_empty(*landmarks.shape[:3], far.values),
        )
        dy_landmarks = self._projected(landmarks) if learned else None
        dcounts = None if seq.decay is None else torch.empty_like(of_keys.token_count)
        found = (dlandmarks, dpooled, dy_landmarks, dcounts, None)
        # States of unbounded maps have float32's digits, and take twice the shared memory.
        for buffers in far.halves(found) if far.phi.unbounded else [found]:
            far.start(key_kernels.bwd_dkv, batch, queries, keys, self.whole, state, seq, *buffers)
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        dy_k = self._projected(k) if learned and not self.near.softmax else None
        numbers = tuple(landmarks.new_empty(2, *k.shape[:3], far.rank))
        launches.start(
            window_kernels.window_backward,
            *(batch, self.queries, launches.window, self.pools, matrix, seq, launches.shares, merged),
            *(queries.grad, means, dlandmarks, dpooled, numbers, dk, dv, dy_k),
            programs=cdiv(k.shape[2], far.tile("window_backward").chunk) * batch * seq.heads,
        )
        parts = cdiv(seq.keys // far.rank, BLOCKS_AT_ONCE)
        pools = self.pools.of_keys
        dpools = landmarks.new_empty(2, batch, seq.heads, parts, *pools.shape[-2:])
        known = (batch, BLOCKS_AT_ONCE, seq, numbers, *dpools)
        # Nobody reads the tokens again.
        places = launches._replace(window=launches.window._replace(keys=None, v=None))
        places.start_pool(pool_kernels.pool_backward, *known, EACH=BLOCKS_AT_ONCE)
        dkeys, dvalues = (part.sum((0, 2) if pools.dim() == 3 else (0, 1, 2)) for part in dpools)
        pairs = ((dy_k, k), (dy_landmarks, landmarks))
        dmatrix = None
        if query_backward.of_matrix is not None and self.given_matrix is not None:
            products = [products_of_queries(dy, x, seq.heads) for dy, x in pairs if dy is not None]
            dmatrix = gradient_of_matrix(self.given_matrix, query_backward.of_matrix(), *products)
        dfar_mass = None
        if self.pools.far_mass is not None:
            # exp(beta) multiplies all of a state but what the first one left in it: states times their gradients say
            # what that changes, those of queries being their gradients of gamma. Sums over landmarks would say the
            # same of numbers that were rounded more often, where little is left of them.
            dfar_mass = landmarks.new_zeros(seq.heads)
            if dfar_weight is not None:
                dfar_mass += dfar_weight.view(seq.heads, -1).sum(1)
            if last is not None:
                dfar_mass += last.along().sum(0)
            if first is not None:
                dfar_mass -= first.along().sum(0)
        dlog_decay = None
        if dcounts is not None:
            of_blocks = (dcounts * of_keys.token_count).unflatten(2, (-1, far.rank)).sum(3)
            # Weights that add up to 1 under a gate.
            of_queries = None
            if dfar_weight is not None:
                of_queries = change.unflatten(1, (seq.heads, -1)).sum(2)
            # Blocks without an end count 0 wherever they are added.
            ends = ends_of_blocks(seq.ends, seq.length, self.near.block_size, k.device)
            at = ends.clamp(min=0).to(torch.int64)[:, None].expand_as(of_blocks)
            of_ends = of_blocks.new_zeros(*of_blocks.shape[:2], seq.length).scatter_add_(2, at, of_blocks)
            of_first = None if first is None else first.along()
            dlog_decay = gradient_of_decay(of_ends, of_queries, along, of_first, seq, far.segment, late=True)
        return dk, dv, dmatrix, dkeys, dvalues, dfar_mass, dlog_decay, None, None, None

    def _projected(self, tokens: Tensor) -> Tensor:
        """A buffer for the gradients of projected tokens."""
        return tokens.new_empty(*tokens.shape[:3], self.call.phi.rows)


class _Saved(NamedTuple):
    """Landmarks, as keys. What nobody needs is empty."""

    landmarks: Tensor
    values: Tensor
    features: Tensor
    feature_logs: Tensor
    token_count: Tensor
    terms: Tensor
    """Of the projection."""

    @property
    def keys(self) -> Keys:
        """The landmarks as kernels take keys."""
        logs = self.feature_logs if self.feature_logs.numel() else None
        tokens = Tokens(Rows.of(self.landmarks), self.features, logs)
        return Keys(tokens, Rows.of(self.values), self.token_count, None)


OPTIONS = {"feature_map": str, "components": int, "near": str}
OPTIONS |= dict.fromkeys(("blocks", "start", "before", "oldest"), int)

forward = Operator(
    "flurka_attention", OPTIONS, FlurkaLaunches.of, queries=4, keys=10, saved=len(_Saved._fields)
)
"""Of the tensors of `FlurkaLaunches`, and a first state."""
