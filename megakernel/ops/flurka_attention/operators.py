"""The launches of FLuRKA as operators that PyTorch differentiates and compiles.

Landmarks are keys of `kernel_attention`'s kernels, which sum them up, pass their states on and give their gradients.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.flurka_attention import join_kernels, pool_kernels, window_kernels
from megakernel.ops.flurka_attention.arguments import Joined, Near, Pools, Shares, Window
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import kernels, key_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Row, Rows, State, Tokens
from megakernel.ops.kernel_attention.launches import (
    SEGMENT,
    WARP_GROUPS,
    Call,
    TileSizes,
    given_or_zeros,
)
from megakernel.ops.kernel_attention.operators import (
    gradient_of_first,
    gradient_of_last,
    gradient_of_matrix,
    products_of_queries,
    sums_of_queries,
)
from megakernel.ops.kernels.features import Phi, padded, phi_of, split_matrix
from megakernel.ops.kernels.launch import capability_of

LANDMARKS = 64
"""Landmarks between two states, at least: fewer would not fill the products of tiles."""

BLOCKS_AT_ONCE = 16
"""Blocks whose parts of the gradients of E and F one program adds up."""


class Options(NamedTuple):
    """The arguments of an op that are no tensors."""

    feature_map: str
    components: int
    near: str
    blocks: int
    start: int
    before: int
    oldest: int


def segment_blocks(phi: Phi, block_size: int, rank: int) -> int:
    """Blocks between two states: at least the tokens that kernel attention takes, and LANDMARKS landmarks."""
    tokens = SEGMENT * max(1, phi.padded_features // 64)
    return max(triton.cdiv(tokens, block_size), triton.cdiv(LANDMARKS, rank))


def tiles_of(phi: Phi, near: Near, size: int, values: int, capability: int) -> dict[str, TileSizes]:
    """What programs of FLuRKA's kernels hold, of tokens of `size` bytes."""
    tiles = dict.fromkeys(("pool", "pool_backward"), TileSizes(16, 16, 4))
    if size == 4:
        names = ("join", "join_backward", "window_backward", "write_keys", "bwd_dkv")
        return tiles | dict.fromkeys(names, TileSizes(32, 32, 4))
    if max(phi.padded_width, padded(values), phi.padded_features // 2) <= 64:
        return tiles | {
            **dict.fromkeys(("join", "join_backward", "write_keys"), TileSizes(64, 64, 4)),
            **dict.fromkeys(("window_backward", "bwd_dkv"), TileSizes(64, 32, 4)),
        }
    has_groups = capability in WARP_GROUPS
    tiles |= {"write_keys": TileSizes(64, 64, 8), "bwd_dkv": TileSizes(64, 64 if has_groups else 32, 8)}
    if phi.unbounded and not has_groups:
        tiles["bwd_dkv"] = TileSizes(32, 32, 8)
    if not near.softmax:
        return tiles | dict.fromkeys(("join", "join_backward", "window_backward"), TileSizes(32, 32, 8))
    if not has_groups:
        return tiles | {
            **dict.fromkeys(("join", "join_backward"), TileSizes(32, 32, 8)),
            "window_backward": TileSizes(64, 32, 8),
        }
    return tiles | {
        **dict.fromkeys(("join", "join_backward"), TileSizes(128, 32, 8)),
        "window_backward": TileSizes(64, 32, 4),
    }


class _Call(NamedTuple):
    """What all launches of a call share, and its tensors as kernels take them."""

    far: Call
    """Of the landmarks."""

    near: Near
    row: Row
    queries: Rows
    window: Window
    pools: Pools
    shares: Shares
    matrix: Matrix
    """The projection in the dtype of tokens."""

    wide_matrix: Matrix
    """The same in that of landmarks, float32."""

    @staticmethod
    def of(form: Options, q: Tensor, tensors: Tensors) -> "_Call":
        """The call of queries q and what is given of keys, as `Shard` has it; without what `joining` says."""
        k, v, matrix, pool_keys, pool_values, mass, starts, windows, ends = tensors
        rank, block_size = pool_keys.shape[-2:]
        heads, length = k.shape[1], k.shape[2] - form.before
        rows = None if matrix is None else matrix.shape[-2]
        phi = phi_of(FeatureMap(form.feature_map, form.components), q.shape[-1], rows)
        near = Near(form.near == "softmax", False, False, form.blocks, block_size, q.shape[-1])
        landmarks = triton.cdiv(length, block_size) * rank
        capability = capability_of(q.device)
        row = Row(starts, form.start, ends, heads, length, q.shape[2], landmarks)
        far = Call(
            phi,
            row._replace(starts=None, ends=None),
            segment_blocks(phi, block_size, rank) * block_size,
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
        terms = (split_matrix(matrix, heads, dtype) for dtype in (q.dtype, torch.float32))
        narrow, wide = (Matrix(x, 0 if x is None else x.stride(0)) for x in terms)
        apart = pool_keys[0].numel() if pool_keys.dim() == 3 else 0
        return _Call(
            far,
            near,
            row,
            Rows.of(q),
            Window(Rows.of(k), Rows.of(v), windows, None, form.before, form.oldest),
            Pools(pool_keys.contiguous(), pool_values.contiguous(), apart, mass.contiguous()),
            Shares(None, None),
            narrow,
            wide,
        )

    def joining(self, gate: Tensor | None, far_weight: Tensor, table: Tensor | None) -> "_Call":
        """The call with what outputs are joined by, and the angles of its window."""
        return self._replace(
            near=self.near._replace(gated=gate is not None, rotary=table is not None),
            window=self.window._replace(table=table),
            shares=Shares(None, far_weight) if gate is None else Shares(gate.contiguous(), None),
        )

    def start(self, kernel: Any, batch: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel of FLuRKA's own."""
        self.far.start(kernel, batch, *arguments, NEAR=self.near, **options)

    def start_pool(self, kernel: Any, batch: int, each: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel of pools, a program for `each` blocks of a key head."""
        programs = batch * self.row.heads * triton.cdiv(self.row.keys // self.far.rank, each)
        sizes = {"RP": padded(self.far.rank), "BP": padded(self.near.block_size)}
        self.start(kernel, batch, self.window, *arguments, programs=programs, **sizes, **options)

    def write(self) -> tuple["_Kept", State]:
        """The landmarks, and what those of each segment add."""
        k, v = self.window.keys.pointer, self.window.columns.pointer
        kept, room = _Kept.room(self, k, v), self.far.sums_of_segments(k, self.row.length)
        self.start_pool(pool_kernels.pool, len(k), 1, self.pools, self.row, *kept[:2], kept.mass)
        self.far.start(kernels.write_keys, len(k), kept.keys, self.wide_matrix, room, self.row, None)
        return kept, room

    def joins(self) -> tuple[Tensor, ...]:
        """Room for outputs and what `Joined` says of them; empty where that is None."""
        q, v = self.queries.pointer, self.window.columns.pointer
        factor = q.new_empty(q.shape[:3], dtype=torch.float32)
        return (
            v.new_empty(*q.shape[:3], self.far.values),
            factor,
            factor.new_empty(q.shape[:3] if self.near.softmax else 0),
            factor.new_empty(len(q), self.row.heads, q.shape[2] if self.far.phi.unbounded else 0),
            factor.new_empty(0 if self.near.gated else q.shape[:3]),
        )

    def joined(self, factor: Tensor, peak: Tensor, scale: Tensor, share: Tensor) -> Joined:
        """The same as kernels take it."""
        near, unbounded = self.near, self.far.phi.unbounded
        rest = (peak if near.softmax else None, scale if unbounded else None, None if near.gated else share)
        return Joined(factor, *rest)

    def join(self, kept: "_Kept", state: State) -> tuple[Tensor, ...]:
        """Outputs and what `Joined` says of them."""
        out, *rest = self.joins()
        known = (self.queries, self.window, kept.keys, self.matrix, state, self.row, self.shares)
        self.start(join_kernels.join, len(out), *known, out, self.joined(*rest))
        return out, *rest

    def bwd_dq(
        self, grad: Tensor, joined: Joined, kept: "_Kept", state: State, learned: bool
    ) -> tuple[Queries, Tensor, Tensor, Tensor, Tensor | None]:
        """What is known of queries then, `means`, `change`, and the gradients of queries and of projected ones."""
        far, q, batch = self.far, self.queries.pointer, len(grad)
        means, change, delta = (torch.empty_like(joined.factor) for _ in range(3))
        tokens = Tokens(self.queries, *far.features(q, far.stored))
        queries = Queries(tokens, Rows.of(grad), joined.factor, delta, joined.scale)
        dq, dy = q.new_empty(q.shape), self._projected(q) if learned else None
        known = (queries, self.window, kept.keys, self.matrix, state, self.row, self.shares, joined)
        self.start(join_kernels.join_backward, batch, *known, dq, dy, means, change)
        if far.stored:
            # Behind their features nobody reads them.
            queries = queries._replace(tokens=tokens._replace(rows=None))
        return queries, means, change, dq, dy

    def bwd_dkv(
        self,
        queries: Queries,
        joined: Joined,
        means: Tensor,
        kept: "_Kept",
        state: State,
        learned: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
        """Gradients of keys, values, E and F, and if `learned` what keys and landmarks add to the projection's."""
        far, row, landmarks, k = self.far, self.row, kept.landmarks, self.window.keys.pointer
        v, batch = self.window.columns.pointer, len(k)
        dlandmarks, dpooled = (
            torch.empty_like(landmarks),
            landmarks.new_empty(*landmarks.shape[:3], far.values),
        )
        dy_landmarks = self._projected(landmarks) if learned else None
        found = (dlandmarks, dpooled, dy_landmarks, None, None)
        # States of unbounded maps have float32's digits, and take twice the shared memory.
        for rooms in far.halves(found) if far.phi.unbounded else [found]:
            far.start(key_kernels.bwd_dkv, batch, queries, kept.keys, self.wide_matrix, state, row, *rooms)
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        dy_k = self._projected(k) if learned and not self.near.softmax else None
        numbers = tuple(landmarks.new_empty(2, *k.shape[:3], far.rank))
        self.start(
            window_kernels.window_backward,
            *(batch, self.queries, self.window, self.pools, self.matrix, row, self.shares, joined),
            *(queries.grad, means, dlandmarks, dpooled, numbers, dk, dv, dy_k),
            programs=triton.cdiv(k.shape[2], far.tile("window_backward").chunk) * batch * row.heads,
        )
        parts = triton.cdiv(row.keys // far.rank, BLOCKS_AT_ONCE)
        pools = self.pools.of_keys
        dpools = landmarks.new_empty(2, batch, row.heads, parts, *pools.shape[-2:])
        known = (batch, BLOCKS_AT_ONCE, row, numbers, *dpools)
        # Nobody reads the tokens again.
        places = self._replace(window=self.window._replace(keys=None, columns=None))
        places.start_pool(pool_kernels.pool_backward, *known, EACH=BLOCKS_AT_ONCE)
        dkeys, dvalues = (part.sum((0, 2) if pools.dim() == 3 else (0, 1, 2)) for part in dpools)
        pairs = ((dy_k, k), (dy_landmarks, landmarks))
        of_matrix = [products_of_queries(dy, x, row.heads) for dy, x in pairs if dy is not None]
        return dk, dv, dkeys, dvalues, of_matrix

    def _projected(self, tokens: Tensor) -> Tensor:
        """Room for the gradients of projected tokens."""
        return tokens.new_empty(*tokens.shape[:3], self.far.phi.rows)


class _Kept(NamedTuple):
    """Landmarks, as keys. What nobody needs is empty."""

    landmarks: Tensor
    values: Tensor
    features: Tensor
    feature_logs: Tensor
    mass: Tensor

    @staticmethod
    def room(call: _Call, k: Tensor, v: Tensor) -> "_Kept":
        """Room for the landmarks of a call."""
        lead = (len(k), call.row.heads, call.row.keys)
        mass = k.new_empty(lead, dtype=torch.float32)
        return _Kept(
            mass.new_empty(*lead, call.near.width),
            v.new_empty(*lead, call.far.values),
            v.new_empty(*lead, call.far.phi.padded_features),
            mass.new_empty(lead if call.far.phi.unbounded else 0),
            mass,
        )

    @property
    def keys(self) -> Keys:
        """The landmarks as kernels take keys."""
        logs = self.feature_logs if self.feature_logs.numel() else None
        tokens = Tokens(Rows.of(self.landmarks), self.features, logs)
        return Keys(tokens, Rows.of(self.values), self.mass, None)


@torch.library.custom_op("megakernel::flurka_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    mass: Tensor,
    gate: Tensor | None,
    far_weight: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    windows: Tensor | None,
    ends: Tensor | None,
    first_sums: Tensor | None,
    first_norms: Tensor | None,
    first_logs: Tensor | None,
    feature_map: str,
    components: int,
    near: str,
    blocks: int,
    start: int,
    before: int,
    oldest: int,
) -> tuple[
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
    Tensor,
]:
    """Output; what `Joined` says of it; landmarks; the states that enter segments; the last state."""
    form = Options(feature_map, components, near, blocks, start, before, oldest)
    keys = (k, v, matrix, pool_keys, pool_values, mass, starts, windows, ends)
    call = _Call.of(form, q, keys).joining(gate, far_weight, table)
    kept, room = call.write()
    first = None if first_sums is None else State(first_sums, first_norms, first_logs)
    entering, last = call.far.pass_on(room, first, starts, call.row.length, reverse=False)
    return *call.join(kept, entering), *kept, *entering, *last


@forward.register_fake
def _(q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, table, starts, windows, ends, *rest):
    keys = (k, v, matrix, pool_keys, pool_values, mass, starts, windows, ends)
    call = _Call.of(Options(*rest[3:]), q, keys).joining(gate, far_weight, table)
    room = call.far.sums_of_segments(k, call.row.length)
    return *call.joins(), *_Kept.room(call, k, v), *room, *call.far.states(k, -1)


@torch.library.custom_op("megakernel::flurka_attention_backward", mutates_args=())
def backward(
    grad: Tensor,
    grad_sums: Tensor,
    grad_norms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    mass: Tensor,
    gate: Tensor | None,
    far_weight: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    windows: Tensor | None,
    ends: Tensor | None,
    first_sums: Tensor | None,
    first_norms: Tensor | None,
    first_logs: Tensor | None,
    kept: list[Tensor],
    learned: bool,
    feature_map: str,
    components: int,
    near: str,
    blocks: int,
    start: int,
    before: int,
    oldest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first nine inputs, and of the first state's sums and normalizers; empty where there are none."""
    form = Options(feature_map, components, near, blocks, start, before, oldest)
    keys = (k, v, matrix, pool_keys, pool_values, mass, starts, windows, ends)
    call = _Call.of(form, q, keys).joining(gate, far_weight, table)
    joined, own = call.joined(*kept[:4]), _Kept(*kept[4:9])
    state, last = State(*kept[9:12]), State(*kept[12:])
    learned, length = learned and matrix is not None, call.row.length
    queries, means, change, dq, dy = call.bwd_dq(grad, joined, own, state, learned)
    outer = gradient_of_last(grad_sums, grad_norms, last.logs)
    room = sums_of_queries(call.far, queries, call.row, k, length)
    behind, first = call.far.pass_on(room, outer, starts, length, reverse=True)
    *found, of_matrix = call.bwd_dkv(queries, joined, means, own, behind, learned)
    dmatrix = q.new_empty(0)
    if dy is not None and matrix is not None:
        dmatrix = gradient_of_matrix(matrix, products_of_queries(dy, q, call.row.heads), *of_matrix)
    dfirst = gradient_of_first(first_logs, first)
    dfar_weight = torch.zeros_like(far_weight) if gate is not None else change.sum((0, 2))
    dmass = _along(last, outer) + dfar_weight.view(call.row.heads, -1).sum(1)
    if first_sums is not None and first_norms is not None:
        dmass = dmass - _along((first_sums, first_norms), dfirst)
    dgate = q.new_empty(0) if gate is None else change
    dk, dv, dkeys, dvalues = found
    return dq, dk, dv, dmatrix, dkeys, dvalues, dmass / mass, dgate, dfar_weight, *dfirst


@backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, *rest):
    learned, first_logs = rest[8], rest[6]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    plain = (x.new_empty(x.shape) for x in (q, k, v))
    small = (x.new_empty(x.shape) for x in (pool_keys, pool_values, mass))
    dgate = far_weight.new_empty(0 if gate is None else gate.shape)
    dfirst = gradient_of_first(first_logs, State(grad_sums, grad_norms, first_logs))
    return *plain, dmatrix, *small, dgate, far_weight.new_empty(far_weight.shape), *dfirst


def _along(state: tuple[Tensor, ...], slope: tuple[Tensor, ...]) -> Tensor:
    """What a change of all sums of a state by a factor changes, (H_kv,).

    The gradient of m (H_kv,) times m is made of these: m multiplies all of a state but what the first one left in it,
    so that the sums of states times their gradients say it: those of queries, which are their gradients of gamma, and
    of the last state, without that of the first. Sums over landmarks of dm_s would say the same of numbers that were
    rounded more often, where little is left of them.
    """
    return (state[0] * slope[0]).sum((0, 2, 3)) + (state[1] * slope[1]).sum((0, 2))


def _keep(ctx, inputs, output) -> None:
    ctx.form = inputs[16:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:13], output[-1])
    ctx.save_for_backward(*inputs[:16], *output[1:])


def _gradients(ctx, grad, *grads):
    wanted, saved = ctx.needs_input_grad, ctx.saved_tensors
    inputs, kept = saved[:16], saved[16:]
    outer = given_or_zeros((grad, grads[12], grads[13]), inputs[0], inputs[2], *kept[-3:-1])
    *found, dsums, dnorms = backward(*outer, *inputs, list(kept), wanted[3], *ctx.form)
    return (
        *(x if needed else None for x, needed in zip(found, wanted)),
        *(None,) * 4,
        *((dsums, dnorms) if inputs[13] is not None else (None, None)),
        *(None,) * (1 + len(ctx.form)),
    )


forward.register_autograd(_gradients, setup_context=_keep)


class _Behind(NamedTuple):
    """What backward knows of queries before it comes to keys."""

    call: _Call
    queries: Queries
    joined: Joined
    means: Tensor
    room: State
    """What each segment's queries add to the gradients of states."""

    of_matrix: Callable[[], Tensor] | None
    """What they add to that of the projection, where it is wanted."""

    along: Tensor
    """And to that of the mass, times the mass."""


class Shard:
    """See `kernel_attention.exchanged.Launches`.

    Tensors of keys are k, v, matrix, pool_keys, pool_values, mass, starts, windows and ends; of queries q, gate,
    far_weight and table.
    """

    written: tuple[_Call, _Kept, State]
    behind: _Behind | None = None

    def __init__(self, q: Tensor, form: Options):
        self.q, self.form = q.detach(), form

    def write(self, *keys: Any) -> tuple[State, Tensors]:
        """See Launches."""
        call = _Call.of(self.form, self.q, keys)
        kept, room = call.write()
        _, own = call.far.pass_on(room, None, call.row.starts, call.row.length, reverse=False, keep=False)
        self.written = call, kept, room
        # What backward takes where nobody asks for outputs.
        self.q = self.q.new_empty(*self.q.shape[:2], 0, self.q.shape[3])
        return own, kept

    def read(self, first: State, *known: Any) -> tuple[Tensors, Tensors]:
        """Output, and what `Joined` says of it."""
        call, kept, room = self.written
        del self.written
        call = call.joining(*known[1:4])
        entering, _ = call.far.pass_on(room, first, call.row.starts, call.row.length, reverse=False)
        return call.join(kept, entering), (*kept, *entering)

    def bwd_read(self, grad: Tensor, first: State, q: Tensor, *known: Any) -> tuple[Tensors, Tensors]:
        """See Launches."""
        (gate, far_weight, table), keys = known[:3], known[3:12]
        call = _Call.of(self.form, q, keys).joining(gate, far_weight, table)
        joined, kept, state = call.joined(*known[12:16]), _Kept(*known[16:21]), State(*known[21:])
        matrix, row = keys[2], call.row
        learned = matrix is not None and matrix.requires_grad
        queries, means, change, dq, dy = call.bwd_dq(grad, joined, kept, state, learned)
        room = sums_of_queries(call.far, queries, row, keys[0], row.length)
        _, found = call.far.pass_on(room, None, row.starts, row.length, reverse=True, keep=False)
        dfirst = gradient_of_first(first.logs, found)
        dfar_weight = torch.zeros_like(far_weight) if gate is not None else change.sum((0, 2))
        along = dfar_weight.view(row.heads, -1).sum(1) - _along(first, dfirst)
        of_matrix = None if dy is None else cache(partial(products_of_queries, dy, q, row.heads))
        self.behind = _Behind(call, queries, joined, means, room, of_matrix, along)
        return dfirst, (dq, None if gate is None else change, dfar_weight, None)

    def bwd_write(self, grads: tuple[Tensor, Tensor], own: State, *known: Any) -> Tensors:
        """See Launches."""
        keys, kept = known[:9], _Kept(*known[9:])
        if self.behind is None:
            given = (None, own.norms.new_zeros(self.q.shape[1]), None)
            out, *joins = _Call.of(self.form, self.q, keys).joining(*given).joins()
            self.bwd_read(out, own, self.q, *given, *keys, *joins, *kept, *own)
        assert self.behind is not None
        call, queries, joined, means, room, of_queries, along = self.behind
        self.behind = None
        outer = gradient_of_last(*grads, own.logs)
        behind, _ = call.far.pass_on(room, outer, call.row.starts, call.row.length, reverse=True)
        *found, of_keys = call.bwd_dkv(queries, joined, means, kept, behind, of_queries is not None)
        dk, dv, *dpools = found
        dmatrix = None if of_queries is None else gradient_of_matrix(keys[2], of_queries(), *of_keys)
        return dk, dv, dmatrix, *dpools, (_along(own, outer) + along) / keys[5], None, None, None
