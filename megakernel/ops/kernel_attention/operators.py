"""The launches of kernel attention as operators that PyTorch differentiates and compiles.

Keys k are (B, H_kv, N, d), or with priors (H_kv, M) the M keys of a position beside each other, (B, H_kv, N, M d).
"""

from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import kernels, key_kernels, query_kernels
from megakernel.ops.kernel_attention.arguments import Keys, Matrix, Queries, Row, Rows, State, Tokens
from megakernel.ops.kernel_attention.launches import Call, given_or_zeros
from megakernel.ops.kernels.features import split_matrix
from megakernel.ops.state import EMPTY


class _Given(NamedTuple):
    """A call's tensors as kernels take them, and its launches over tokens."""

    call: Call
    k: Tensor
    v: Tensor
    row: Row
    keys: Keys
    matrix: Matrix

    @staticmethod
    def of(call: Call, tensors: Tensors, features: Iterable[Tensor]) -> "_Given":
        """Of k, v, matrix, mass, priors, starts, and room for features of keys: empty where they are not stored."""
        k, v, matrix, mass, priors, starts = tensors
        stored = (x if x.numel() else None for x in features)
        split = split_matrix(matrix, k.shape[1], k.dtype)
        masses, shares = (None if x is None else x.to(torch.float32).contiguous() for x in (mass, priors))
        keys = Keys(Tokens(Rows.of(k), *stored), Rows.of(v), masses, shares)
        terms = Matrix(split, 0 if split is None else split.stride(0))
        return _Given(call, k, v, call.row._replace(starts=starts), keys, terms)

    def write(self, scale: Tensor) -> State:
        """What each segment's keys add; with features, and of unbounded maps `scale` (B, H_kv, N)."""
        call, largest = self.call, scale if self.call.causal and scale.numel() else None
        room = call.sums_of_segments(self.k, self.k.shape[2])
        call.start(kernels.write_keys, len(self.k), self.keys, self.matrix, room, self.row, largest)
        return room

    def read(self, q: Tensor, state: State, rooms: Tensors, normalize: bool) -> None:
        """Outputs, 1 / den and r."""
        out, inverse, scale = rooms
        self.call.start(
            kernels.read,
            *(len(q), Rows.of(q), self.keys, self.matrix, state, self.row),
            *(out, inverse, scale if self.call.phi.unbounded else None),
            NORMALIZE=normalize,
        )

    def bwd_dq(
        self,
        q: Tensor,
        grad: Tensor,
        inverse: Tensor,
        scale: Tensor,
        state: State,
        normalize: bool,
        learned: bool,
    ) -> tuple[Queries, Tensor, Tensor | None]:
        """What is known of queries then, and the gradients of queries and, if `learned`, of projected ones."""
        dq, dy = q.new_empty(q.shape), self._projected(q) if learned else None
        queries = Queries(
            Tokens(Rows.of(q), *self.call.features(q, self.call.stored)),
            Rows.of(grad),
            inverse,
            torch.empty_like(inverse) if normalize else None,
            scale if self.call.phi.unbounded else None,
        )
        known = (queries, self.keys, self.matrix, state, self.row)
        self.call.start(query_kernels.bwd_dq, len(q), *known, dq, dy, NORMALIZE=normalize)
        return queries, dq, dy

    def bwd_dkv(
        self, queries: Queries, state: State, learned: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of keys, values, masses and priors, and if `learned` what keys add to that of the projection."""
        call, k, batch = self.call, self.k, len(self.k)
        dk, dv = k.new_empty(k.shape), self.v.new_empty(self.v.shape)
        dy = self._projected(k, max(call.keys, 1)) if learned else None
        dmass = None if self.keys.mass is None else torch.empty_like(self.keys.mass)
        parts = k.new_empty(*k.shape[:3], call.keys, dtype=torch.float32) if call.keys else None
        known = (queries, self.keys, self.matrix, state, self.row)
        for wanted in call.halves((dk, dv, dy, dmass, parts)):
            call.start(key_kernels.bwd_dkv, batch, *known, *wanted)
        dpriors = None if parts is None else parts.sum((0, 2))
        of_matrix = None
        if dy is not None:
            of_keys = k.unflatten(-1, (max(call.keys, 1), -1)).movedim(3, 2)
            of_matrix = products_of_tokens(dy.movedim(0, 2), of_keys)
        return dk, dv, of_matrix, dmass, dpriors

    def _projected(self, tokens: Tensor, *lead: int) -> Tensor:
        """Room for the gradients of projected tokens."""
        return tokens.new_empty(*lead, *tokens.shape[:3], self.call.phi.rows)


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
    given = _Given.of(call, (k, v, matrix, mass, priors, starts), features)
    room = given.write(scale)
    first = None if first_sums is None else State(first_sums, first_norms, first_logs)
    entering, last = call.pass_on(room, first, starts, k.shape[2], reverse=False)
    given.read(q, entering if causal else last, (out, inverse, scale), normalize)
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
    given = _Given.of(call, (k, v, matrix, mass, priors, starts), (features, feature_logs))
    length, learned = k.shape[2] if causal else q.shape[2], learned and matrix is not None
    state = State(sums, norms, logs) if causal else State(last_sums, last_norms, last_logs)
    queries, dq, dy = given.bwd_dq(q, grad, inverse, scale, state, normalize, learned)
    outer = gradient_of_last(grad_sums, grad_norms, last_logs)
    room = sums_of_queries(call, queries, given.row, k, length)
    entering, first = call.pass_on(room, outer, starts, length, reverse=True)
    dk, dv, of_matrix, dmass, dpriors = given.bwd_dkv(queries, entering if causal else first, learned)
    dmatrix = q.new_empty(0)
    if dy is not None and of_matrix is not None and matrix is not None:
        dmatrix = gradient_of_matrix(matrix, of_matrix, products_of_queries(dy, q, k.shape[1]))
    dmass, dpriors = (q.new_empty(0, dtype=torch.float32) if x is None else x for x in (dmass, dpriors))
    return dq, dk, dv, dmatrix, dmass, dpriors, *gradient_of_first(first_logs, first)


def sums_of_queries(call: Call, queries: Queries, row: Row, k: Tensor, length: int) -> State:
    """What the queries of each segment of `length` tokens of keys k add to the gradients of states."""
    room = call.sums_of_segments(k, length, of_queries=True)
    if row.queries:
        call.start(query_kernels.write_queries, len(k), queries, room, row)
    else:
        # A row without queries of its own hands the last state's gradient to its keys, segment by segment.
        for part, nothing in zip(room, (0.0, 0.0, EMPTY)):
            part.fill_(nothing)
    return room


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


def products_of_tokens(dy: Tensor, x: Tensor) -> Tensor:
    """The sum over tokens of dy x^T, (H_kv, M, d) float32; dy (B, H_kv, G, N, M) and x (B, H_kv, G, N, d)."""
    return torch.einsum("bhgnm,bhgnd->hmd", dy, x).float()


def products_of_queries(dy: Tensor, x: Tensor, heads: int) -> Tensor:
    """The same of dy (B, H, N, M) and x (B, H, N, d), which G heads of each of H_kv `heads` of keys have."""
    return products_of_tokens(dy.unflatten(1, (heads, -1)), x.unflatten(1, (heads, -1)))


def gradient_of_matrix(matrix: Tensor, *parts: Tensor) -> Tensor:
    """The sum of parts (H_kv, M, d) as the gradient of matrix (M, d) or (H_kv, M, d)."""
    per_head = reduce(torch.add, parts).to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


@_backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, mass, priors, starts, first_logs, *rest):
    learned = rest[10]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    dmass = q.new_empty(k.shape[:3] if mass is not None else (0,), dtype=torch.float32)
    dpriors = q.new_empty(priors.shape if priors is not None else (0,), dtype=torch.float32)
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


class _Behind(NamedTuple):
    """What backward knows of queries before it comes to keys."""

    given: _Given
    queries: Queries
    room: State
    """What each segment's queries add to the gradients of states."""

    of_matrix: Callable[[], Tensor] | None
    """What they add to that of the projection, where it is wanted."""


class Shard:
    """See `exchanged.Launches`; tensors of keys are k, v, matrix, mass, priors and starts, of queries q."""

    written: tuple[_Given, State, Tensors]
    behind: _Behind | None = None

    def __init__(
        self, q: Tensor, feature_map: str, components: int, causal: bool, normalize: bool, start: int
    ):
        self.q, self.normalize = q.detach(), normalize
        self.form = (feature_map, components, causal, start)

    def write(self, *keys: Any) -> tuple[State, Tensors]:
        """See `exchanged.Launches`."""
        k, v, matrix, _, priors, starts = keys
        call = Call.of(self.q, k, v, matrix, priors, *self.form)
        rooms = _of_tokens(call, self.q, k, v)
        given = _Given.of(call, keys, rooms[3:])
        room = given.write(rooms[2])
        _, own = call.pass_on(room, None, starts, k.shape[2], reverse=False, keep=False)
        self.written = given, room, rooms
        # What backward takes where nobody asks for outputs.
        self.q = self.q.new_empty(*self.q.shape[:2], 0, self.q.shape[3])
        return own, rooms[3:]

    def read(self, first: State, *known: Any) -> tuple[Tensors, Tensors]:
        """Output, 1 / den and r."""
        given, room, rooms = self.written
        del self.written
        entering, _ = given.call.pass_on(room, first, given.row.starts, given.row.keys, reverse=False)
        given.read(known[0], entering, rooms[:3], self.normalize)
        return rooms[:3], (*rooms[3:], *entering)

    def bwd_read(self, grad: Tensor, first: State, q: Tensor, *known: Any) -> tuple[Tensors, Tensors]:
        """See `exchanged.Launches`."""
        keys, (inverse, scale, *features), state = known[:6], known[6:-3], State(*known[-3:])
        k, v, matrix, _, priors, starts = keys
        call = Call.of(q, k, v, matrix, priors, *self.form)
        given = _Given.of(call, keys, features)
        learned = matrix is not None and matrix.requires_grad
        queries, dq, dy = given.bwd_dq(q, grad, inverse, scale, state, self.normalize, learned)
        room = sums_of_queries(call, queries, given.row, k, k.shape[2])
        _, found = call.pass_on(room, None, starts, k.shape[2], reverse=True, keep=False)
        of_matrix = None if dy is None else cache(partial(products_of_queries, dy, q, k.shape[1]))
        self.behind = _Behind(given, queries, room, of_matrix)
        return gradient_of_first(first.logs, found), (dq,)

    def bwd_write(self, grads: tuple[Tensor, Tensor], own: State, *known: Any) -> Tensors:
        """See `exchanged.Launches`."""
        keys, features = known[:6], known[6:]
        k, v, matrix, _, priors, starts = keys
        if self.behind is None:
            call = Call.of(self.q, k, v, matrix, priors, *self.form)
            out, *rooms = _of_tokens(call, self.q, k, v)[:3]
            self.bwd_read(out, own, self.q, *keys, *rooms, *features, *own)
        assert self.behind is not None
        given, queries, room, of_queries = self.behind
        self.behind = None
        outer = gradient_of_last(*grads, own.logs)
        behind, _ = given.call.pass_on(room, outer, starts, k.shape[2], reverse=True)
        dk, dv, of_keys, dmass, dpriors = given.bwd_dkv(queries, behind, of_queries is not None)
        dmatrix = None
        if of_queries is not None and of_keys is not None:
            dmatrix = gradient_of_matrix(matrix, of_keys, of_queries())
        return dk, dv, dmatrix, dmass, dpriors, None
