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
from megakernel.ops.kernel_attention import kernels, key_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Row, Rows, State, Tokens
from megakernel.ops.kernel_attention.launches import (
    SEGMENT,
    WARP_GROUPS,
    Call,
    Tile,
    given_or_zeros,
)
from megakernel.ops.kernel_attention.operators import (
    gradient_of_first,
    gradient_of_last,
    gradient_of_matrix,
    states_of_queries,
)
from megakernel.ops.kernels.features import Phi, padded, phi_of, split_matrix
from megakernel.ops.kernels.launch import capability_of

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


class _Kept(NamedTuple):
    """What forward leaves behind, but for the output. What nobody needs is empty."""

    factor: Tensor
    peak: Tensor
    scale: Tensor
    share: Tensor
    """Of queries, see `Joined`."""

    landmarks: Tensor
    values: Tensor
    features: Tensor
    feature_logs: Tensor
    mass: Tensor
    """Of landmarks, as keys."""

    sums: Tensor
    norms: Tensor
    logs: Tensor
    """The states that enter segments."""

    @staticmethod
    def room(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> "_Kept":
        """Room for what the call leaves behind."""
        far, near, unbounded = call.far, call.near, call.far.phi.unbounded
        factor = q.new_empty(q.shape[:3], dtype=torch.float32)
        lead = (len(k), call.row.heads, call.row.keys)
        return _Kept(
            factor,
            factor.new_empty(q.shape[:3] if near.softmax else 0),
            factor.new_empty(*lead[:2], q.shape[2] if unbounded else 0),
            factor.new_empty(0 if near.gated else q.shape[:3]),
            factor.new_empty(*lead, near.width),
            v.new_empty(*lead, far.values),
            v.new_empty(*lead, far.phi.padded_features),
            factor.new_empty(lead if unbounded else 0),
            factor.new_empty(lead),
            *far.sums_of_segments(k, call.row.length),
        )

    @property
    def joined(self) -> Joined:
        """Of queries, as kernels take it."""
        return Joined(self.factor, *(x if x.numel() else None for x in self[1:4]))

    @property
    def keys(self) -> Keys:
        """The landmarks as kernels take keys."""
        logs = self.feature_logs if self.feature_logs.numel() else None
        tokens = Tokens(Rows.of(self.landmarks), self.features, logs)
        return Keys(tokens, Rows.of(self.values), self.mass, None)

    @property
    def state(self) -> State:
        """The states that enter segments."""
        return State(self.sums, self.norms, self.logs)


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
    """Output; `_Kept`; the last state."""
    form = Form(feature_map, components, near, blocks, start, before, oldest)
    call = _Call.of(
        *(form, q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight),
        *(table, starts, windows, ends),
    )
    out, kept, batch = v.new_empty(*q.shape[:3], v.shape[-1]), _Kept.room(call, q, k, v), len(k)
    landmarks = kept.keys
    call.start_pool(
        pool_kernels.pool,
        *(batch, 1, call.pools, call.row, kept.landmarks, kept.values, kept.mass),
    )
    call.far.start(kernels.write_keys, batch, landmarks, call.wide_matrix, kept.state, call.row, None)
    first = None if first_sums is None else State(first_sums, first_norms, first_logs)
    entering, last = call.far.pass_on(kept.state, first, starts, call.row.length, reverse=False)
    call.start(
        join_kernels.join,
        *(batch, call.queries, call.window, landmarks, call.matrix, entering, call.row, call.shares),
        *(out, kept.joined),
    )
    return out, *kept[:-3], *entering, *last


@forward.register_fake
def _(q, k, v, *rest):
    call = _Call.of(Form(*rest[13:]), q, k, v, *rest[:10])
    last = call.far.states(k, -1)
    return v.new_empty(*q.shape[:3], v.shape[-1]), *_Kept.room(call, q, k, v), *last


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
    own, last = _Kept(*kept[:-3]), State(*kept[-3:])
    joined, landmarks = own.joined, own.keys
    learned = learned and matrix is not None

    def projected(tokens: Tensor, wanted: bool = True) -> Tensor | None:
        """Room for the gradients of projected tokens."""
        return tokens.new_empty(*tokens.shape[:3], far.phi.rows) if learned and wanted else None

    dq, dy_q = q.new_empty(q.shape), projected(q)
    means, change, delta = (torch.empty_like(own.factor) for _ in range(3))
    queries = Queries(
        Tokens(call.queries, *far.features(q, far.stored)),
        Rows.of(grad),
        joined.factor,
        delta,
        joined.scale,
    )
    call.start(
        join_kernels.join_backward,
        *(batch, queries, call.window, landmarks, call.matrix, own.state, row, call.shares, joined),
        *(dq, dy_q, means, change),
    )
    if far.stored:
        # Behind their features nobody reads them.
        queries = queries._replace(tokens=queries.tokens._replace(rows=None))
    outer = gradient_of_last(grad_sums, grad_norms, last.logs)
    behind, first = states_of_queries(far, queries, row, k, row.length, outer)
    marks = own.landmarks
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
        pairs = [(dy, x) for dy, x in ((dy_q, q), (dy_k, k), (dy_marks, marks)) if dy is not None]
        dmatrix = gradient_of_matrix(
            matrix, *((x.unflatten(1, (row.heads, -1)) for x in pair) for pair in pairs)
        )
    dfirst = gradient_of_first(first_logs, first)
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
