"""The launches of kernel attention as operators that PyTorch differentiates and compiles.

Keys k are (B, H_kv, N, d), or with priors (H_kv, M) the M keys of a position beside each other, (B, H_kv, N, M d).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.kernel_attention import kernels, key_kernels, query_kernels, value_kernels
from megakernel.ops.kernel_attention.launches import Call, given_or_zeros, total
from megakernel.ops.kernels import states
from megakernel.ops.kernels.features import split_matrix
from megakernel.ops.kernels.launch import launch, rows_together, strides
from megakernel.ops.state import EMPTY

States = tuple[Tensor, Tensor, Tensor]
"""Sums, normalizers and log scales, see `megakernel.ops.kernels.states`."""


class _PackedArguments(NamedTuple):
    """What kernels take beside tokens; an empty tensor in place of one that is not used."""

    mass: Tensor
    starts: Tensor
    matrix: Tensor
    priors: Tensor

    low: int
    """From a matrix to what rounding took off it."""

    flags: dict[str, Any]
    """What kernels with keys are told of them."""

    @staticmethod
    def of(
        q: Tensor,
        heads: int,
        mass: Tensor | None,
        starts: Tensor | None,
        matrix: Tensor | None,
        priors: Tensor | None,
    ) -> "_PackedArguments":
        """For `heads` key heads."""
        split = split_matrix(matrix, heads, q.dtype)
        masses, shares = (None if x is None else x.to(torch.float32).contiguous() for x in (mass, priors))
        low = 0 if split is None else split.stride(0)
        flags = {"MASSES": mass is not None, "KEYS": 0 if priors is None else priors.shape[-1]}
        masses, places, terms, shares = (
            q.new_empty(0) if x is None else x for x in (masses, starts, split, shares)
        )
        return _PackedArguments(masses, places, terms, shares, low, flags)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output; 1 / den and r of each query; the states of all segments; the last state."""
    call = Call.of(q, k, v, matrix, feature_map, components, causal, normalize, start)
    q, k, v = rows_together(q), rows_together(k), rows_together(v)
    length, heads = k.shape[2], k.shape[1]
    packed = _PackedArguments.of(q, heads, mass, starts, matrix, priors)
    room = call.empty_states(k, v, length)
    launch(
        states.write_keys,
        call.grid("write_keys", k, length),
        *(k, v, *packed[:4], *room, *strides(k), *strides(v)),
        *(length, start, heads, call.segments(length), packed.low),
        **packed.flags,
        **call.options("write_keys", v, starts),
    )
    first = (first_sums, first_norms, first_logs)
    sums, norms, logs = call.pass_on(room, first, starts, length, reverse=False)
    queries = q.shape[2]
    out, inverse, scale = _of_queries(q, k, v, call)
    if queries:
        launch(
            kernels.read,
            call.grid("read", k, queries),
            *(q, k, v, *packed[:4], sums, norms, logs, out, inverse, scale),
            *(*strides(q), *strides(k), *strides(v)),
            *(queries, start, heads, call.segments(queries), call.segments(length), packed.low),
            G=call.group,
            CAUSAL=causal,
            NORMALIZE=normalize,
            **packed.flags,
            **call.options("read", v, starts),
        )
    last = (sums[:, :, -1].clone(), norms[:, :, -1].clone(), logs[:, :, -1].clone())
    return out, inverse, scale, sums, norms, logs, *last


def _of_queries(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Room for outputs, and for 1 / den and r of each query."""
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    inverse = out.new_empty(q.shape[:3], dtype=torch.float32)
    return out, inverse, inverse.new_empty(*k.shape[:2], q.shape[2] if call.phi.unbounded else 0)


@attend.register_fake
def _(q, k, v, matrix, mass, priors, starts, first_sums, first_norms, first_logs, *form):
    call = Call.of(q, k, v, matrix, *form)
    sums, norms, logs = call.empty_states(k, v, k.shape[2])
    last = (torch.empty_like(x[:, :, -1], memory_format=torch.contiguous_format) for x in (sums, norms, logs))
    return *_of_queries(q, k, v, call), sums, norms, logs, *last


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
    out: Tensor,
    inverse: Tensor,
    scale: Tensor,
    sums: Tensor,
    norms: Tensor,
    logs: Tensor,
    last_logs: Tensor,
    learned: bool,
    feature_map: str,
    components: int,
    causal: bool,
    normalize: bool,
    start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, matrix, mass, priors, the first state's sums and normalizers; empty where unwanted."""
    call = Call.of(q, k, v, matrix, feature_map, components, causal, normalize, start)
    q, k, v, grad = rows_together(q), rows_together(k), rows_together(v), rows_together(grad)
    packed = _PackedArguments.of(q, k.shape[1], mass, starts, matrix, priors)
    tokens = _Tokens(q, k, v, grad, packed, starts, inverse, scale, learned, call)
    dq, dy_q, drift = _pull_queries(tokens, (sums, norms, logs), out)
    # A last state without keys has gradients and no scale: they go to nothing.
    empty = last_logs <= EMPTY / 2
    outer = (
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last_logs),
    )
    pulled = call.pass_on(_write_queries(tokens, drift), outer, starts, tokens.span, reverse=True)
    dv, dmass = _pull_values(tokens, pulled, drift)
    dk, dy_k, dpriors = _pull_keys(tokens, pulled, drift)
    dmatrix = q.new_empty(0)
    if learned and matrix is not None:
        dmatrix = _matrix_gradient(matrix, q, k, dy_q, dy_k)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        # Sums are those of the first state times exp(its log scale).
        factor = torch.exp(first_logs + pulled[2][:, :, -1])
        dfirst = (pulled[0][:, :, -1] * factor[..., None, None], pulled[1][:, :, -1] * factor[..., None])
    return dq, dk, dv, dmatrix, dmass, dpriors, *dfirst


@_backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, mass, priors, starts, first_logs, *rest):
    learned = rest[7]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    dmass = q.new_empty(k.shape[:3] if mass is not None else (0,), dtype=torch.float32)
    dpriors = q.new_empty(priors.shape if priors is not None else (0,), dtype=torch.float32)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        dfirst = (torch.empty_like(grad_sums), torch.empty_like(grad_norms))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dmatrix, dmass, dpriors, *dfirst)


class _Tokens(NamedTuple):
    """What all launches of backward share."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    packed: _PackedArguments
    starts: Tensor | None
    inverse: Tensor
    scale: Tensor
    learned: bool
    call: Call

    @property
    def span(self) -> int:
        """Tokens of a row of states of queries.

        A row without queries of its own hands the last state's gradient to its keys, segment by segment.
        """
        return self.k.shape[2] if self.call.causal else self.q.shape[2]

    @property
    def strides(self) -> tuple[int, ...]:
        """Of all tokens."""
        return *strides(self.q), *strides(self.k), *strides(self.v), *strides(self.grad)

    @property
    def flags(self) -> dict[str, Any]:
        """What kernels are told of queries."""
        return {"G": self.call.group if self.q.shape[2] else 0, "CAUSAL": self.call.causal}


def _pull_queries(tokens: _Tokens, entering: States, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, those of projected ones (blocks, B, H, N, M), and the drifts (B, H, N)."""
    q, k, call, packed = tokens.q, tokens.k, tokens.call, tokens.packed
    queries, length = q.shape[2], k.shape[2]
    dq = call.parts("pull_queries", q, q.shape[-1])
    dy = call.parts("pull_queries", q, call.phi.rows if tokens.learned else 0)
    drifts = call.parts("pull_queries", tokens.inverse, 1)
    if not call.normalize:
        drifts = torch.zeros_like(drifts[:1])
    if queries:
        launch(
            query_kernels.pull_queries,
            call.grid("pull_queries", k, queries),
            *(*tokens[:4], *packed[:4], *entering, out, tokens.inverse, drifts, dq, dy, *tokens.strides),
            *(queries, call.start, k.shape[1], call.segments(queries), call.segments(length), packed.low),
            q.shape[0] * q.shape[1] * queries,
            NORMALIZE=call.normalize,
            LEARNED=tokens.learned,
            **tokens.flags,
            **packed.flags,
            **call.options("pull_queries", tokens.v, tokens.starts),
        )
    return total(dq, q), dy, total(drifts, drifts)


def _write_queries(tokens: _Tokens, drift: Tensor) -> States:
    """What each segment's queries add to the gradient of the state that enters it."""
    q, k, call, packed = tokens.q, tokens.k, tokens.call, tokens.packed
    queries = q.shape[2]
    room = call.empty_states(k, tokens.v, tokens.span)
    if not queries:
        for part, nothing in zip(room, (0.0, 0.0, EMPTY)):
            part.fill_(nothing)
        return room
    launch(
        query_kernels.write_queries,
        call.grid("write_queries", k, queries),
        *(q, tokens.grad, tokens.inverse, drift, tokens.scale, packed.starts, packed.matrix, *room),
        *(*strides(q), *strides(tokens.grad)),
        *(queries, call.start, k.shape[1], call.segments(queries), packed.low),
        **tokens.flags,
        **call.options("write_queries", tokens.v, tokens.starts),
    )
    return room


def _pull_values(tokens: _Tokens, pulled: States, drift: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of values and of masses."""
    k, v, call, packed = tokens.k, tokens.v, tokens.call, tokens.packed
    dv = v.new_empty(v.shape)
    blocks = call.tiles.blocks("pull_values")
    weighted = packed.flags["MASSES"]
    dmass = tokens.inverse.new_empty((blocks, *k.shape[:3]) if weighted else (blocks, 0))
    launch(
        value_kernels.pull_values,
        call.grid("pull_values", k, k.shape[2]),
        # Values themselves have a part in the gradients of masses alone.
        *(
            tokens.q,
            k,
            v if weighted else v[:0],
            tokens.grad,
            *packed[:4],
            *_behind(tokens, pulled, drift),
            dv,
            dmass,
            *_sizes(tokens),
        ),
        **tokens.flags,
        **packed.flags,
        **call.options("pull_values", v, tokens.starts),
    )
    return dv, total(dmass, dmass)


def _pull_keys(tokens: _Tokens, pulled: States, drift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of keys, of projected ones (blocks, max(M, 1), B, H_kv, N, rows), and of priors."""
    k, call, packed = tokens.k, tokens.call, tokens.packed
    keys = packed.flags["KEYS"]
    dk = call.parts("pull_keys", k, k.shape[-1])
    rows = call.parts("pull_keys", k, call.phi.rows if tokens.learned else 0)
    dy = rows.new_empty(len(rows), max(keys, 1), *rows.shape[1:])
    grid = call.grid("pull_keys", k, k.shape[2])
    dpriors = tokens.inverse.new_empty(*grid, keys)
    launch(
        key_kernels.pull_keys,
        grid,
        *(*tokens[:4], *packed[:4], *_behind(tokens, pulled, drift), dk, dy, dpriors, *_sizes(tokens)),
        LEARNED=tokens.learned,
        **tokens.flags,
        **packed.flags,
        **call.options("pull_keys", tokens.v, tokens.starts),
    )
    shares = dpriors.view(len(k), k.shape[1], -1, keys).sum((0, 2)) if keys else dpriors.view(0)
    return total(dk, k), dy, shares


def _behind(tokens: _Tokens, pulled: States, drift: Tensor) -> tuple[Tensor, ...]:
    """The states of queries behind keys, and what is known of each query."""
    inverse = tokens.inverse
    if tokens.q.shape[2]:
        return *pulled, inverse, drift, tokens.scale
    nobody = torch.full(tokens.k.shape[:3], EMPTY, dtype=torch.float32, device=tokens.k.device)
    return *pulled, inverse, drift, nobody


def _sizes(tokens: _Tokens) -> tuple[int, ...]:
    """Strides and sizes that kernels over keys take."""
    k, call = tokens.k, tokens.call
    length, heads = k.shape[2], k.shape[1]
    lengths = (length, call.start, heads, call.segments(length), call.segments(tokens.span))
    return *tokens.strides, *lengths, tokens.packed.low, k.shape[0] * heads * length


def _matrix_gradient(matrix: Tensor, q: Tensor, k: Tensor, dy_q: Tensor, dy_k: Tensor) -> Tensor:
    """sum over tokens of dy x^T: (M, d) or (H_kv, M, d)."""
    heads, width = k.shape[1], q.shape[-1]
    of_keys = torch.einsum("rbhnm,bhnrd->hmd", total(dy_k, k), k.unflatten(-1, (-1, width)))
    grouped = (total(dy_q, q).unflatten(1, (heads, -1)), q.unflatten(1, (heads, -1)))
    of_queries = torch.einsum("bhgnm,bhgnd->hmd", *grouped)
    per_head = (of_keys.float() + of_queries.float()).to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


def _keep(ctx, inputs, output) -> None:
    q, k, v, matrix, mass, priors, starts, first_sums, _, first_logs, *form = inputs
    out, inverse, scale, sums, norms, logs, *_, last_logs = output
    ctx.form, ctx.continues = form, first_sums is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(inverse, scale, sums, norms, logs, last_logs)
    ctx.save_for_backward(
        *(q, k, v, matrix, mass, priors, starts, first_logs),
        *(out, inverse, scale, sums, norms, logs, last_logs),
    )


def _pull_back(ctx, grad, *grads):
    wanted, kept = ctx.needs_input_grad, ctx.saved_tensors
    outer = given_or_zeros((grad, grads[5], grads[6]), kept[8], *kept[-4:-2])
    dq, dk, dv, dmatrix, dmass, dpriors, dsums, dnorms = torch.ops.megakernel.kernel_attention_backward(
        *outer, *kept, wanted[3], *ctx.form
    )
    packed = (x if wanted[index] else None for index, x in ((3, dmatrix), (4, dmass), (5, dpriors)))
    first = (dsums, dnorms) if ctx.continues else (None, None)
    return dq, dk, dv, *packed, None, *first, *(None,) * (1 + len(ctx.form))


attend.register_autograd(_pull_back, setup_context=_keep)
