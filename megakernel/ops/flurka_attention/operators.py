"""The launches of FLuRKA as operators that PyTorch differentiates and compiles.

Landmarks are keys of `kernel_attention`'s kernels, which sum them up, pass their states on and give their gradients.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.flurka_attention import join_kernels, pool_kernels, window_kernels
from megakernel.ops.flurka_attention.arguments import Joined, Near, Pools, Shares, Window
from megakernel.ops.kernel_attention import kernels, key_kernels, query_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Row, Rows, State, Tokens
from megakernel.ops.kernel_attention.launches import (
    SEGMENT,
    WARP_GROUPS,
    Call,
    Tile,
    given_or_zeros,
)
from megakernel.ops.kernels.features import Phi, padded, phi_of, split_matrix
from megakernel.ops.kernels.launch import capability_of
from megakernel.ops.state import EMPTY

LANDMARKS = 64
"""Landmarks between two states, at least: fewer would not fill the products of tiles."""

BLOCKS_AT_ONCE = 16
"""Blocks whose parts of the gradients of E and F one program adds up."""


class Form(NamedTuple):
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


def tiles_of(phi: Phi, near: Near, size: int, values: int, capability: int) -> dict[str, Tile]:
    """What programs of FLuRKA's kernels hold, of tokens of `size` bytes."""
    tiles = dict.fromkeys(("pool", "pool_backward"), Tile(16, 16, 4))
    if size == 4:
        names = ("join", "join_backward", "window_backward", "write_keys", "bwd_dkv")
        return tiles | dict.fromkeys(names, Tile(32, 32, 4))
    if max(phi.padded_width, padded(values), phi.padded_features // 2) <= 64:
        return tiles | {
            **dict.fromkeys(("join", "join_backward", "write_keys"), Tile(64, 64, 4)),
            **dict.fromkeys(("window_backward", "bwd_dkv"), Tile(64, 32, 4)),
        }
    tiles |= {"write_keys": Tile(64, 64, 8), "bwd_dkv": Tile(64, 64, 8)}
    if not near.softmax:
        return tiles | dict.fromkeys(("join", "join_backward", "window_backward"), Tile(32, 32, 8))
    if capability not in WARP_GROUPS:
        return tiles | {
            **dict.fromkeys(("join", "join_backward"), Tile(32, 32, 8)),
            "window_backward": Tile(64, 32, 8),
        }
    return tiles | {
        **dict.fromkeys(("join", "join_backward"), Tile(128, 32, 8)),
        "window_backward": Tile(64, 32, 4),
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
    def of(
        form: Form,
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
    ) -> "_Call":
        """The call with these arguments; k and v begin with `before` tokens of the tail."""
        rank, block_size = pool_keys.shape[-2:]
        heads, length = k.shape[1], k.shape[2] - form.before
        rows = None if matrix is None else matrix.shape[-2]
        phi = phi_of(FeatureMap(form.feature_map, form.components), q.shape[-1], rows)
        near = Near(
            form.near == "softmax", gate is not None, table is not None, form.blocks, block_size, q.shape[-1]
        )
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
            Window(Rows.of(k), Rows.of(v), windows, table, form.before, form.oldest),
            Pools(pool_keys.contiguous(), pool_values.contiguous(), apart, mass.contiguous()),
            Shares(None if gate is None else gate.contiguous(), None if gate is not None else far_weight),
            narrow,
            wide,
        )

    def start(self, kernel: Any, batch: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel of FLuRKA's own."""
        self.far.start(kernel, batch, *arguments, NEAR=self.near, **options)

    def start_pool(self, kernel: Any, batch: int, each: int, *arguments: Any, **options: Any) -> None:
        """Start a kernel of pools, a program for `each` blocks of a key head."""
        programs = batch * self.row.heads * triton.cdiv(self.row.keys // self.far.rank, each)
        sizes = {"RP": padded(self.far.rank), "BP": padded(self.near.block_size)}
        self.start(kernel, batch, self.window, *arguments, programs=programs, **sizes, **options)


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
    """See `_rooms`."""
    form = Form(feature_map, components, near, blocks, start, before, oldest)
    call = _Call.of(
        *(form, q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight),
        *(table, starts, windows, ends),
    )
    rooms = _rooms(call, q, k, v)
    out, joined, landmarks, last = _parts(rooms)
    batch = len(k)
    call.start_pool(
        pool_kernels.pool,
        *(batch, 1, call.pools, call.row, landmarks.tokens.rows.pointer, landmarks.columns.pointer),
        landmarks.mass,
    )
    room = State(*rooms[10:13])
    call.far.start(kernels.write_keys, batch, landmarks, call.wide_matrix, room, call.row, None)
    first = None if first_sums is None else State(first_sums, first_norms, first_logs)
    entering, last = call.far.pass_on(room, first, starts, call.row.length, reverse=False)
    call.start(
        join_kernels.join,
        *(batch, call.queries, call.window, landmarks, call.matrix, entering, call.row, call.shares),
        *(out, joined),
    )
    return *rooms[:10], *entering, *last


def _rooms(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Output; factor, peak, r and share of queries; landmarks, their values, features, log scales and masses; states.

    The states that enter segments, and the last one. What nobody needs is empty.
    """
    far, near, unbounded = call.far, call.near, call.far.phi.unbounded
    out = v.new_empty(*q.shape[:3], far.values)
    factor = out.new_empty(q.shape[:3], dtype=torch.float32)
    lead = (len(k), call.row.heads, call.row.keys)
    landmarks = factor.new_empty(*lead, near.width)
    return (
        out,
        factor,
        factor.new_empty(q.shape[:3] if near.softmax else 0),
        factor.new_empty(*lead[:2], q.shape[2] if unbounded else 0),
        factor.new_empty(0 if near.gated else q.shape[:3]),
        landmarks,
        v.new_empty(*lead, far.values),
        v.new_empty(*lead, far.phi.padded_features),
        factor.new_empty(lead if unbounded else 0),
        factor.new_empty(lead),
        *far.sums_of_segments(k, call.row.length),
        *far.states(k, -1),
    )


def _parts(rooms: tuple[Tensor, ...]) -> tuple[Tensor, Joined, Keys, State]:
    """`_rooms` as kernels take them."""
    out, factor, peak, scale, share, landmarks, values, features, logs, mass = rooms[:10]
    joined = Joined(factor, *(x if x.numel() else None for x in (peak, scale, share)))
    tokens = Tokens(Rows.of(landmarks), features, logs if logs.numel() else None)
    return out, joined, Keys(tokens, Rows.of(values), mass, None), State(*rooms[13:])


@forward.register_fake
def _(q, k, v, *rest):
    return _rooms(_Call.of(Form(*rest[13:]), q, k, v, *rest[:10]), q, k, v)


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
    form = Form(feature_map, components, near, blocks, start, before, oldest)
    call = _Call.of(
        *(form, q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight),
        *(table, starts, windows, ends),
    )
    far, row, batch = call.far, call.row, len(k)
    _out, joined, landmarks, last = _parts(tuple(kept))
    entering = State(*kept[10:13])
    learned = learned and matrix is not None

    def projected(tokens: Tensor, wanted: bool = True) -> Tensor | None:
        """Room for the gradients of projected tokens."""
        return tokens.new_empty(*tokens.shape[:3], far.phi.rows) if learned and wanted else None

    dq, dy_q, means, change = q.new_empty(q.shape), projected(q), torch.empty_like(joined.factor), None
    queries = Queries(
        Tokens(call.queries, *far.features(q, far.stored)),
        Rows.of(grad),
        joined.factor,
        torch.empty_like(joined.factor),
        joined.scale,
    )
    change = torch.empty_like(joined.factor)
    call.start(
        join_kernels.join_backward,
        *(batch, queries, call.window, landmarks, call.matrix, entering, row, call.shares, joined),
        *(dq, dy_q, means, change),
    )
    if far.stored:
        # Behind their features nobody reads them.
        queries = queries._replace(tokens=queries.tokens._replace(rows=None))
    room = far.sums_of_segments(k, row.length)
    if row.queries:
        far.start(query_kernels.write_queries, batch, queries, room, row)
    else:
        # A row without queries of its own hands the last state's gradient to its landmarks.
        for part, nothing in zip(room, (0.0, 0.0, EMPTY)):
            part.fill_(nothing)
    # A last state without keys has gradients and no scale: they go to nothing.
    empty = last.logs <= EMPTY / 2
    outer = State(
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last.logs),
    )
    behind, first = far.pass_on(room, outer, starts, row.length, reverse=True)
    marks = landmarks.tokens.rows.pointer
    dmarks, dpooled, dy_marks = (
        torch.empty_like(marks),
        marks.new_empty(*marks.shape[:3], far.values),
        projected(marks),
    )
    far.start(
        key_kernels.bwd_dkv,
        *(batch, queries, landmarks, call.wide_matrix, behind, row, dmarks, dpooled, dy_marks, None, None),
    )
    dk, dv, dy_k = k.new_empty(k.shape), v.new_empty(v.shape), projected(k, near == "kernel")
    tiles = triton.cdiv(k.shape[2], far.tile("window_backward").chunk)
    call.start(
        window_kernels.window_backward,
        *(batch, call.queries, call.window, call.pools, call.matrix, row, call.shares, joined, queries.grad),
        *(means, dmarks, dpooled, dk, dv, dy_k),
        programs=tiles * batch * row.heads,
    )
    parts = triton.cdiv(row.keys // far.rank, BLOCKS_AT_ONCE)
    dpools = marks.new_empty(2, batch, row.heads, parts, *pool_keys.shape[-2:])
    call.start_pool(
        pool_kernels.pool_backward,
        *(batch, BLOCKS_AT_ONCE, row, dmarks, dpooled, *dpools),
        EACH=BLOCKS_AT_ONCE,
    )
    dkeys, dvalues = (part.sum((0, 2) if pool_keys.dim() == 3 else (0, 1, 2)) for part in dpools)
    dmatrix = q.new_empty(0)
    if learned and matrix is not None:
        dmatrix = _of_matrix(matrix, row.heads, [(dy_q, q), (dy_k, k), (dy_marks, marks)])
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        # Sums are those of the first state times exp(its log scale).
        scaled = torch.exp(first_logs + first.logs)
        dfirst = (first.sums * scaled[..., None, None], first.norms * scaled[..., None])
    dfar_weight = torch.zeros_like(far_weight) if gate is not None else change.sum((0, 2))
    dmass = _along(last, outer) + dfar_weight.view(row.heads, -1).sum(1)
    if first_sums is not None and first_norms is not None:
        dmass = dmass - _along((first_sums, first_norms), dfirst)
    dgate = q.new_empty(0) if gate is None else change
    return dq, dk, dv, dmatrix, dkeys, dvalues, dmass / mass, dgate, dfar_weight, *dfirst


@backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, *rest):
    learned, first_logs = rest[8], rest[6]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    plain = (x.new_empty(x.shape) for x in (q, k, v))
    small = (x.new_empty(x.shape) for x in (pool_keys, pool_values, mass))
    dgate = far_weight.new_empty(0 if gate is None else gate.shape)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        dfirst = (torch.empty_like(grad_sums), torch.empty_like(grad_norms))
    return *plain, dmatrix, *small, dgate, far_weight.new_empty(far_weight.shape), *dfirst


def _along(state: tuple[Tensor, ...], slope: tuple[Tensor, ...]) -> Tensor:
    """What a change of all sums of a state by a factor changes, (H_kv,).

    The gradient of m (H_kv,) times m is made of these: m multiplies all of a state but what the first one left in it,
    so that the sums of states times their gradients say it: those of queries, which are their gradients of gamma, and
    of the last state, without that of the first. Sums over landmarks of dm_s would say the same of numbers that were
    rounded more often, where little is left of them.
    """
    return (state[0] * slope[0]).sum((0, 2, 3)) + (state[1] * slope[1]).sum((0, 2))


def _of_matrix(matrix: Tensor, heads: int, pairs: list[tuple[Tensor | None, Tensor]]) -> Tensor:
    """The sum over tokens x and the gradients dy of their projections of dy x^T: (M, d) or (H_kv, M, d)."""
    per_head = torch.zeros((heads, *matrix.shape[-2:]), dtype=torch.float32, device=matrix.device)
    for dy, x in pairs:
        if dy is not None:
            grouped = (dy.unflatten(1, (heads, -1)), x.unflatten(1, (heads, -1)))
            per_head += torch.einsum("bhgnm,bhgnd->hmd", *grouped).float()
    per_head = per_head.to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


def _keep(ctx, inputs, output) -> None:
    ctx.form = inputs[16:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:13], output[-1])
    ctx.save_for_backward(*inputs[:16], *output)


def _pull_back(ctx, grad, *grads):
    wanted, saved = ctx.needs_input_grad, ctx.saved_tensors
    inputs, kept = saved[:16], saved[16:]
    outer = given_or_zeros((grad, grads[12], grads[13]), kept[0], *kept[13:15])
    *found, dsums, dnorms = backward(*outer, *inputs, list(kept), wanted[3], *ctx.form)
    return (
        *(x if needed else None for x, needed in zip(found, wanted)),
        *(None,) * 4,
        *((dsums, dnorms) if inputs[13] is not None else (None, None)),
        *(None,) * (1 + len(ctx.form)),
    )


forward.register_autograd(_pull_back, setup_context=_keep)
