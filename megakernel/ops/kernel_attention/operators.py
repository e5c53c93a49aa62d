"""The launches of kernel attention as operators that PyTorch differentiates and compiles.

Keys k are (B, H_kv, N, d), or with priors (H_kv, M) the M keys of a position beside each other, (B, H_kv, N, M d).
"""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.ops.kernel_attention import kernels, key_kernels, query_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Row, Rows, State, Tokens
from megakernel.ops.kernel_attention.launches import Call, given_or_zeros
from megakernel.ops.kernels.features import split_matrix
from megakernel.ops.state import EMPTY


class _Inputs(NamedTuple):
    """A call's tensors as kernels take them."""

    call: Call
    k: Tensor
    row: Row
    keys: Keys
    matrix: Matrix

    @staticmethod
    def of(
        call: Call,
        k: Tensor,
        v: Tensor,
        matrix: Tensor | None,
        mass: Tensor | None,
        priors: Tensor | None,
        starts: Tensor | None,
        features: tuple[Tensor | None, ...],
    ) -> "_Inputs":
        """With the room for features of keys, or what is in it."""
        split = split_matrix(matrix, k.shape[1], k.dtype)
        masses, shares = (None if x is None else x.to(torch.float32).contiguous() for x in (mass, priors))
        keys = Keys(Tokens(Rows.of(k), *features), Rows.of(v), masses, shares)
        terms = Matrix(split, 0 if split is None else split.stride(0))
        return _Inputs(call, k, call.row._replace(starts=starts), keys, terms)


@torch.library.custom_op("megakernel::kernel_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    mass: Tensor | None,
    priors: Tensor | None,
    starts: Tensor | None,
    first_sums: Tensor | None,
    first_norms: Tensor | None,
    first_logs: Tensor | None,
    feature_map: str,
    components: int,
    causal: bool,
    normalize: bool,
    start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `_outputs`."""
    call = Call.of(q, k, v, matrix, priors, feature_map, components, causal, start)
    out, inverse, scale, *features = _of_tokens(call, q, k, v)
    stored = tuple(x if x.numel() else None for x in features)
    given = _Inputs.of(call, k, v, matrix, mass, priors, starts, stored)
    batch, length = len(k), k.shape[2]
    room = call.sums_of_segments(k, length)
    largest = scale if causal and scale.numel() else None
    call.start(kernels.write_keys, batch, given.keys, given.matrix, room, given.row, largest)
    first = None if first_sums is None else State(first_sums, first_norms, first_logs)
    entering, last = call.pass_on(room, first, starts, length, reverse=False)
    state = entering if causal else last
    rest = (out, inverse, scale if call.phi.unbounded else None)
    call.start(
        kernels.read,
        *(batch, Rows.of(q), given.keys, given.matrix, state, given.row, *rest),
        NORMALIZE=normalize,
    )
    kept = entering if causal else call.sums_of_segments(k, 0)
    return out, inverse, scale, *features, *kept, *last


def _of_tokens(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Room for outputs, for 1 / den and r of queries, and for features of keys, empty where there are none."""
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    inverse = out.new_empty(q.shape[:3], dtype=torch.float32)
    scale = inverse.new_empty(*k.shape[:2], q.shape[2] if call.phi.unbounded else 0)
    features, logs = call.features(k, call.stored)
    nothing = inverse.new_empty(0)
    return (
        out,
        inverse,
        scale,
        k.new_empty(0) if features is None else features,
        nothing if logs is None else logs,
    )


@attend.register_fake
def _outputs(q, k, v, matrix, mass, priors, starts, first_sums, first_norms, first_logs, *form):
    """Outputs; 1 / den and r of queries; features of keys and their log scales; states of segments; the last state."""
    feature_map, components, causal, _, start = form
    call = Call.of(q, k, v, matrix, priors, feature_map, components, causal, start)
    room = call.sums_of_segments(k, k.shape[2] if causal else 0)
    return *_of_tokens(call, q, k, v), *room, *call.states(k, -1)


@torch.library.custom_op("megakernel::kernel_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_sums: Tensor,
    grad_norms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    mass: Tensor | None,
    priors: Tensor | None,
    starts: Tensor | None,
    first_logs: Tensor | None,
    inverse: Tensor,
    scale: Tensor,
    features: Tensor,
    feature_logs: Tensor,
    sums: Tensor,
    norms: Tensor,
    logs: Tensor,
    last_sums: Tensor,
    last_norms: Tensor,
    last_logs: Tensor,
    learned: bool,
    feature_map: str,
    components: int,
    causal: bool,
    normalize: bool,
    start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, matrix, mass, priors, the first state's sums and normalizers; empty where unwanted."""
    call = Call.of(q, k, v, matrix, priors, feature_map, components, causal, start)
    stored = tuple(x if x.numel() else None for x in (features, feature_logs))
    given = _Inputs.of(call, k, v, matrix, mass, priors, starts, stored)
    batch, heads, length = k.shape[:3]
    span = length if causal else q.shape[2]
    learned = learned and matrix is not None

    def projected(tokens: Tensor, *lead: int) -> Tensor | None:
        """Room for the gradients of projected tokens."""
        return tokens.new_empty(*lead, *tokens.shape[:3], call.phi.rows) if learned else None

    dq, dy_q = q.new_empty(q.shape), projected(q)
    queries = Queries(
        Tokens(Rows.of(q), *call.features(q, call.stored)),
        Rows.of(grad),
        inverse,
        torch.empty_like(inverse) if normalize else None,
        scale if call.phi.unbounded else None,
    )
    state = State(sums, norms, logs) if causal else State(last_sums, last_norms, last_logs)
    call.start(
        query_kernels.bwd_dq,
        *(batch, queries, given.keys, given.matrix, state, given.row, dq, dy_q),
        NORMALIZE=normalize,
    )
    outer = gradient_of_last(grad_sums, grad_norms, last_logs)
    entering, first = states_of_queries(call, queries, given.row, k, span, outer)
    dk, dv, dy_k = k.new_empty(k.shape), v.new_empty(v.shape), projected(k, max(call.keys, 1))
    dmass = None if mass is None else inverse.new_empty(k.shape[:3])
    programs = call.programs("bwd_dkv", batch)
    dpriors = inverse.new_empty(programs, call.keys) if call.keys else None
    known = (queries, given.keys, given.matrix, entering if causal else first, given.row)
    for wanted in call.halves((dk, dv, dy_k, dmass, dpriors)):
        call.start(key_kernels.bwd_dkv, batch, *known, *wanted)
    shares = q.new_empty(0) if dpriors is None else dpriors.view(batch, heads, -1, call.keys).sum((0, 2))
    dmatrix = q.new_empty(0)
    if dy_q is not None and dy_k is not None and matrix is not None:
        of_keys = k.unflatten(-1, (max(call.keys, 1), -1)).movedim(3, 2)
        of_queries = (x.unflatten(1, (heads, -1)) for x in (dy_q, q))
        dmatrix = gradient_of_matrix(matrix, (dy_k.movedim(0, 2), of_keys), of_queries)
    dfirst = gradient_of_first(first_logs, first)
    return dq, dk, dv, dmatrix, inverse.new_empty(0) if dmass is None else dmass, shares, *dfirst


def states_of_queries(
    call: Call, queries: Queries, row: Row, k: Tensor, length: int, outer: State
) -> tuple[State, State]:
    """The gradients of the states that leave the segments of `length` tokens of keys k, and of the first one.

    outer: that of the state that leaves the row.
    """
    room = call.sums_of_segments(k, length)
    if row.queries:
        call.start(query_kernels.write_queries, len(k), queries, room, row)
    else:
        # A row without queries of its own hands the last state's gradient to its keys, segment by segment.
        for part, nothing in zip(room, (0.0, 0.0, EMPTY)):
            part.fill_(nothing)
    return call.pass_on(room, outer, row.starts, length, reverse=True)


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


def gradient_of_matrix(matrix: Tensor, *pairs: Iterable[Tensor]) -> Tensor:
    """The sum over tokens of dy x^T, (M, d) or (H_kv, M, d); pairs: dy (B, H_kv, G, N, M) and x (B, H_kv, G, N, d)."""
    parts = (torch.einsum("bhgnm,bhgnd->hmd", *pair).float() for pair in pairs)
    per_head = reduce(torch.add, parts).to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


@_backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, mass, priors, starts, first_logs, *rest):
    learned = rest[10]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    dmass = q.new_empty(k.shape[:3] if mass is not None else (0,), dtype=torch.float32)
    dpriors = q.new_empty(priors.shape, dtype=torch.float32) if priors is not None else q.new_empty(0)
    dfirst = gradient_of_first(first_logs, State(grad_sums, grad_norms, first_logs))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dmatrix, dmass, dpriors, *dfirst)


def _keep(ctx, inputs, output) -> None:
    *tensors, first_sums, _, first_logs = inputs[:10]
    ctx.form, ctx.continues = inputs[10:], first_sums is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:8], output[-1])
    ctx.save_for_backward(*tensors, first_logs, *output[1:])


def _gradients(ctx, grad, *grads):
    wanted, kept = ctx.needs_input_grad, ctx.saved_tensors
    outer = given_or_zeros((grad, grads[7], grads[8]), kept[0], kept[2], *kept[-3:-1])
    dq, dk, dv, dmatrix, dmass, dpriors, dsums, dnorms = torch.ops.megakernel.kernel_attention_backward(
        *outer, *kept, wanted[3], *ctx.form
    )
    packed = (x if wanted[index] else None for index, x in ((3, dmatrix), (4, dmass), (5, dpriors)))
    first = (dsums, dnorms) if ctx.continues else (None, None)
    return dq, dk, dv, *packed, None, *first, *(None,) * (1 + len(ctx.form))


attend.register_autograd(_gradients, setup_context=_keep)
