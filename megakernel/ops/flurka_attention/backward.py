"""The launches of FLuRKA's backward: through windows, landmarks and the states between them."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from megakernel.ops.flurka_attention.key_kernels import pull_keys
from megakernel.ops.flurka_attention.landmark_kernels import pull_landmarks
from megakernel.ops.flurka_attention.launches import Call, Inputs, Shape, total
from megakernel.ops.flurka_attention.pool_kernels import pull_pools
from megakernel.ops.flurka_attention.query_kernels import pull_queries, write_queries
from megakernel.ops.flurka_attention.window_kernels import pull_window
from megakernel.ops.kernels.launch import rows_together, strides
from megakernel.ops.state import EMPTY


class _Kept(NamedTuple):
    """What forward left: see `launched.forward`."""

    out: Tensor
    factor: Tensor
    peak: Tensor
    scale: Tensor
    marks: Tensor
    features: Tensor
    mark_logs: Tensor
    marked: Tensor
    states: tuple[Tensor, Tensor, Tensor]


class _OfQueries(NamedTuple):
    """What pulls at queries give."""

    dq: Tensor
    dy: Tensor
    """(B, H, N, M), that of projected queries; empty unless learned."""

    dgate: Tensor
    dfar_weight: Tensor
    delta: Tensor
    drift: Tensor


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
    first_logs: Tensor | None,
    out: Tensor,
    factor: Tensor,
    peak: Tensor,
    scale: Tensor,
    marks: Tensor,
    features: Tensor,
    mark_logs: Tensor,
    marked: Tensor,
    sums: Tensor,
    norms: Tensor,
    logs: Tensor,
    last_logs: Tensor,
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
    shape = Shape(feature_map, components, near, blocks, start, before, oldest)
    call = Call.of(q, k, v, matrix, pool_keys, gate, table, starts, windows, shape)
    given = Inputs.of(
        q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, table, starts, windows, ends
    )
    grad = rows_together(grad)
    kept = _Kept(out, factor, peak, scale, marks, features, mark_logs, marked, (sums, norms, logs))
    learned = learned and matrix is not None
    if q.shape[2]:
        of_queries = _pull_queries(call, given, kept, grad, learned)
    else:
        # A row without queries of its own hands the last state's gradient to its landmarks.
        none = torch.zeros_like(factor)
        dgate = none if gate is not None else none[0, 0]
        of_queries = _OfQueries(
            q.new_empty(q.shape), q[..., :0], dgate, torch.zeros_like(far_weight), none, none
        )
    # A last state without keys has gradients and no scale: they go to nothing.
    empty = last_logs <= EMPTY / 2
    outer = (
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last_logs),
    )
    pulled = _states_of_queries(call, given, kept, grad, of_queries.drift, starts, outer)
    (dmarks, dmarked), dy_marks = _pull_landmarks(call, given, kept, grad, of_queries.drift, pulled, learned)
    dk, dv, dy_k = _pull_keys(call, given, kept, grad, of_queries.delta, dmarks, dmarked, learned)
    dkeys, dvalues = _pull_pools(call, given, dmarks, dmarked, pool_keys)
    dmatrix = q.new_empty(0)
    if learned and matrix is not None:
        pairs = [(dy_marks, marks.flatten(2, 3))]
        if q.shape[2]:
            pairs.append((of_queries.dy, q))
        if near == "kernel":
            pairs.append((dy_k, k))
        dmatrix = _of_matrix(matrix, k.shape[1], pairs)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        # Sums are those of the first state times exp(its log scale).
        scaled = torch.exp(first_logs + pulled[2][:, :, -1])
        dfirst = (pulled[0][:, :, -1] * scaled[..., None, None], pulled[1][:, :, -1] * scaled[..., None])
    dmass = _of_mass(kept, of_queries, outer, None if first_logs is None else dfirst) / given.mass
    of_join = (of_queries.dgate, of_queries.dfar_weight)
    return of_queries.dq, dk, dv, dmatrix, dkeys, dvalues, dmass, *of_join, *dfirst


@backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, *rest):
    # `rest` ends with learned and the shape.
    learned, first_logs = rest[-1 - len(Shape._fields)], rest[4]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    plain = (x.new_empty(x.shape) for x in (q, k, v))
    small = (x.new_empty(x.shape) for x in (pool_keys, pool_values, mass))
    dgate = far_weight.new_empty(0 if gate is None else gate.shape)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        dfirst = (torch.empty_like(grad_sums), torch.empty_like(grad_norms))
    return *plain, dmatrix, *small, dgate, far_weight.new_empty(far_weight.shape), *dfirst


def _of_mass(
    kept: _Kept,
    of_queries: _OfQueries,
    outer: tuple[Tensor, Tensor, Tensor],
    dfirst: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The gradient of m (H_kv,), times m.

    m multiplies all of a state but what the first one left in it, so that the sums of states times their gradients say
    it: those of queries, which are their gradients of gamma, and of the last state, without that of the first. Sums
    over landmarks of dm_s would say the same of numbers that were rounded more often, where little is left of them.
    """

    def along(state: tuple[Tensor, Tensor], slope: tuple[Tensor, ...]) -> Tensor:
        return (state[0] * slope[0]).sum((0, 2, 3)) + (state[1] * slope[1]).sum((0, 2))

    sums, norms, _ = kept.states
    whole = along((sums[:, :, -1], norms[:, :, -1]), outer)
    if dfirst is not None:
        whole = whole - along((sums[:, :, 0], norms[:, :, 0]), dfirst)
    return whole + of_queries.dfar_weight.view(len(whole), -1).sum(1)


def _pull_queries(call: Call, given: Inputs, kept: _Kept, grad: Tensor, learned: bool) -> _OfQueries:
    q, gated, of_kernel = given.q, call.options["GATED"], call.shape.near == "kernel"
    rows = call.phi.rows if learned else 0
    dq = call.empty_parts("pull_queries", q, q.shape[-1], more=True)
    dy = call.empty_parts("pull_queries", q, rows, more=of_kernel)
    delta, factor = torch.empty_like(kept.factor), kept.factor
    near = factor.new_empty(0 if gated else factor.shape)
    # A gated window's delta is that of its own mean, not of the output.
    out = kept.out[:0] if gated else kept.out
    tiles = triton.cdiv(call.length, call.window_tile("pull_window").chunk)
    call.each(
        pull_window,
        tiles * q.shape[0] * q.shape[1],
        *(q, given.k, given.v, grad, out, given.gate, given.far_weight, factor, kept.peak, kept.scale),
        *(given.windows, given.matrix, given.table, dq[-1], dy[-1] if of_kernel else dy[:0], delta, near),
        *(*strides(q), *strides(given.k), *strides(given.v), *strides(grad)),
        *(call.length, call.shape.oldest, call.shape.before, q.shape[1], tiles, given.low),
        LEARNED=learned,
    )
    blocks = call.blocks("pull_queries")
    along, drift = factor.new_empty(blocks, *factor.shape), factor.new_empty(blocks, *factor.shape)
    call.carry(
        pull_queries,
        *(q, grad, given.gate, given.mass, factor, near, kept.scale, given.starts, given.ends),
        *(given.matrix, kept.features, kept.mark_logs, kept.marked, *kept.states, dq, dy, along, drift),
        *(*strides(q), *strides(grad), call.length, call.shape.start, call.shape.oldest),
        *(call.heads, call.segments, call.chunks, given.low, factor.numel()),
        LEARNED=learned,
        MORE=blocks == 1,
        MORE_PROJECTED=blocks == 1 and of_kernel,
    )
    whole, of_norm = total(along, along), total(drift, drift)
    found = (total(dq, q), total(dy, q))
    if not gated:
        return _OfQueries(*found, factor.new_empty(0), whole.sum((0, 2)), delta, of_norm)
    share, rest = torch.sigmoid(given.gate), torch.sigmoid(-given.gate)
    dgate = share * (rest * delta - whole)
    return _OfQueries(*found, dgate, torch.zeros_like(given.far_weight), delta, of_norm)


def _states_of_queries(
    call: Call,
    given: Inputs,
    kept: _Kept,
    grad: Tensor,
    drift: Tensor,
    starts: Tensor | None,
    outer: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """What the queries behind each segment add to the gradient of the state that leaves it; `outer`, behind all."""
    room = call.empty_states(given.k)
    if given.q.shape[2]:
        call.carry(
            write_queries,
            *(given.q, grad, kept.factor, drift, kept.scale, given.starts, given.matrix, *room),
            *(*strides(given.q), *strides(grad), call.length, call.shape.start),
            *(call.heads, call.segments, given.low),
        )
    else:
        for part, nothing in zip(room, (0.0, 0.0, EMPTY)):
            part.fill_(nothing)
    return call.pass_on(room, outer, starts, reverse=True)


def _pull_landmarks(
    call: Call,
    given: Inputs,
    kept: _Kept,
    grad: Tensor,
    drift: Tensor,
    pulled: tuple[Tensor, Tensor, Tensor],
    learned: bool,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Gradients of landmarks, and of projected ones (B, H_kv, chunks r, M)."""
    blocks = call.blocks("pull_landmarks")
    lead = (blocks, *kept.marks.shape[:4])
    dmarks = kept.marks.new_empty(*lead, call.phi.width)
    dy = kept.marks.new_empty(*lead, call.phi.rows if learned else 0)
    dmarked, scale = torch.empty_like(kept.marked), kept.scale
    if not given.q.shape[2]:
        scale = torch.full((*given.k.shape[:2], call.length), EMPTY, dtype=torch.float32, device=grad.device)
    call.carry(
        pull_landmarks,
        *(given.q, grad, given.mass, kept.factor, drift, scale, given.starts, given.ends),
        *(given.matrix, given.wide_matrix, kept.marks, kept.marked, *pulled, dmarks, dmarked, dy),
        *(*strides(given.q), *strides(grad), call.length, call.shape.start, call.shape.oldest),
        *(call.heads, call.segments, call.chunks, given.low, dmarks[0, ..., 0].numel()),
        LEARNED=learned,
    )
    return (total(dmarks, dmarks), dmarked), total(dy, dy).flatten(2, 3)


def _pull_keys(
    call: Call,
    given: Inputs,
    kept: _Kept,
    grad: Tensor,
    delta: Tensor,
    dmarks: Tensor,
    dmarked: Tensor,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, values and projected keys; the latter empty unless a window compares features."""
    k, v = given.k, given.v
    rows = call.phi.rows if learned and call.shape.near == "kernel" else 0
    dk, dv, dy = k.new_empty(k.shape), v.new_empty(v.shape), k.new_empty(*k.shape[:3], rows)
    tiles = triton.cdiv(k.shape[2], call.window_tile("pull_keys").chunk)
    call.each(
        pull_keys,
        tiles * k.shape[0] * k.shape[1],
        *(given.q, k, v, grad, given.gate, given.far_weight, kept.factor, kept.peak, kept.scale, delta),
        *(given.windows, given.ends, given.matrix, given.table, given.pool_keys, given.pool_values),
        *(dmarks, dmarked, dk, dv, dy, *strides(given.q), *strides(k), *strides(v), *strides(grad)),
        *(given.pool_head, call.length, call.shape.oldest, call.shape.before),
        *(call.heads, tiles, call.chunks, given.low),
        LEARNED=rows > 0,
    )
    return dk, dv, dy


def _pull_pools(
    call: Call, given: Inputs, dmarks: Tensor, dmarked: Tensor, pools: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of E and F, of the shape of `pools`."""
    lead = (given.k.shape[0], call.heads, call.segments)
    dkeys = dmarks.new_empty(*lead, call.rank, call.block_size)
    dvalues = torch.empty_like(dkeys)
    call.carry(
        pull_pools,
        *(
            given.k,
            given.v,
            given.ends,
            dmarks,
            dmarked,
            dkeys,
            dvalues,
            *strides(given.k),
            *strides(given.v),
        ),
        *(call.length, call.shape.oldest, call.shape.before, call.heads, call.segments, call.chunks),
        whole_rows=True,
    )
    over = (0, 1, 2) if pools.dim() == 2 else (0, 2)
    return dkeys.sum(over), dvalues.sum(over)


def _of_matrix(matrix: Tensor, heads: int, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum over tokens x and the gradients dy of their projections of dy x^T: (M, d) or (H_kv, M, d)."""
    per_head = torch.zeros((heads, *matrix.shape[-2:]), dtype=torch.float32, device=matrix.device)
    for dy, x in pairs:
        grouped = (dy.unflatten(1, (heads, -1)), x.unflatten(1, (heads, -1)))
        per_head += torch.einsum("bhgnm,bhgnd->hmd", *grouped).float()
    per_head = per_head.to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head
