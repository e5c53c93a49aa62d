"""Kernel attention by Triton kernels: two launches and a small one forward, four and a small one backward.

Forward sums each segment's keys, passes the sums on to the states that enter the segments (small), and reads. Backward
does the same with queries and their pulls from the right, and gives the gradients of queries and of keys. Between the
two nothing is kept but the inputs, the output, two numbers per token and one state per segment; nothing of the width of
the features ever reaches memory.
"""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.arguments import check_state
from megakernel.ops.documents import Positions, open_documents
from megakernel.ops.feature_maps import FeatureMap, named
from megakernel.ops.kernel_attention import decode, kernels, key_kernels, query_kernels
from megakernel.ops.kernel_attention.launches import Call, state_of, tiles_of, total
from megakernel.ops.kernels import states
from megakernel.ops.kernels.features import SUPPORTED, phi_of, split_matrix
from megakernel.ops.kernels.launch import launch, rows_together, strides
from megakernel.ops.projections import Projection, dense, rows_of
from megakernel.ops.state import EMPTY, Exchange, KernelState

WIDEST = 128
"""d and M up to which a program's tiles fit into registers."""


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap | str,
    projection: Projection | None,
    causal: bool,
    normalize: bool,
    mass: Tensor | None,
    priors: Tensor | None = None,
    positions: Positions,
    initial_state: KernelState | None,
    exchange: Exchange | None = None,
    exchange_after: Exchange | None = None,
) -> str | None:
    """Why the kernels cannot take these arguments of `attend`; None where they can."""
    form = named(feature_map)
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"q is {q.dtype}; expected bfloat16, float16 or float32"
    if form.name not in SUPPORTED or form.smoothing:
        given = f"{form.name} with smoothing" if form.smoothing else form.name
        return f"feature_map is {given}; expected {', '.join(SUPPORTED)} without smoothing"
    if priors is not None:
        return "k is a mixture of keys; expected one key at a position"
    step = _step(feature_map, projection, causal, normalize, mass, positions, initial_state, exchange)
    if step is not None and decode.unsupported(q, k, v, **step) is None:
        return None
    width = q.shape[-1]
    sizes = {"q": width, "v": v.shape[-1], "projection": rows_of(projection, width)}
    for name, size in sizes.items():
        if size > WIDEST:
            return f"{name} has width {size}; expected at most {WIDEST}"
    if not causal and isinstance(positions, Tensor):
        return "positions cut rows into documents that see both ways; expected whole rows"
    if exchange_after is not None:
        return "exchange_after is given; expected tokens that see no later ones"
    return None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: FeatureMap | str,
    projection: Projection | None,
    causal: bool,
    normalize: bool,
    mass: Tensor | None,
    priors: Tensor | None = None,
    positions: Positions,
    initial_state: KernelState | None,
    exchange: Exchange | None = None,
    exchange_after: Exchange | None = None,
) -> tuple[Tensor, KernelState]:
    """Arguments and results of `chunked.attend`, in bfloat16, float16 or float32."""
    assert priors is None
    step = _step(feature_map, projection, causal, normalize, mass, positions, initial_state, exchange)
    if step is not None and decode.unsupported(q, k, v, **step) is None:
        return decode.step(q, k, v, **step)
    width, value_dim = q.shape[-1], v.shape[-1]
    matrix = dense(projection, width)
    phi = phi_of(feature_map, width, None if matrix is None else matrix.shape[-2])
    starts, start = _document_starts(positions, k.shape[2])
    form = named(feature_map)

    def run(queries: Tensor, first: KernelState | None):
        if first is not None:
            check_state(first, k, v)
        tile = (None, None, None) if first is None else tiles_of(first, phi, value_dim)
        out, *_, sums, norms, logs = torch.ops.megakernel.kernel_attention(
            queries, k, v, matrix, mass, starts, *tile, form.name, form.components, causal, normalize, start
        )
        return out, state_of(sums, norms, logs, phi, value_dim)

    if exchange is None:
        return run(q, initial_state)
    # What these keys add, as the state behind a row without queries of its own.
    _, own = run(q[:, :, :0], None)
    pending = exchange(own, open_documents(positions, q.shape[2], q.shape[0], q.device))
    return run(q, pending.wait())[0], own


def _step(
    feature_map: FeatureMap | str,
    projection: Projection | None,
    causal: bool,
    normalize: bool,
    mass: Tensor | None,
    positions: Positions,
    state: KernelState | None,
    exchange: Exchange | None,
) -> dict[str, Any] | None:
    """The arguments of `decode.step`, if all tokens continue `state` in this process."""
    continues = isinstance(positions, int) and positions > 0
    if not causal or not continues or state is None or exchange is not None:
        return None
    options = {"feature_map": feature_map, "projection": projection, "normalize": normalize}
    return {**options, "mass": mass, "state": state}


def _document_starts(positions: Positions, length: int) -> tuple[Tensor | None, int]:
    """The place where each token's document starts, (B, N) int32, or of all tokens: negative before the row."""
    if isinstance(positions, int):
        return None, -1 if positions > 0 else 0
    places = torch.arange(length, device=positions.device)
    return (places - positions).clamp(min=-1).to(torch.int32), 0


def _beside_tokens(
    q: Tensor, mass: Tensor | None, starts: Tensor | None, matrix: Tensor | None, heads: int
) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """What kernels take beside tokens: masses, starts and matrix, q in place of the unused; `low` of the last."""
    split = split_matrix(matrix, heads, q.dtype)
    wide = None if mass is None else mass.to(torch.float32).contiguous()
    masses, places, terms = (q if given is None else given for given in (wide, starts, split))
    return (masses, places, terms), 0 if split is None else split.stride(0)


@torch.library.custom_op("megakernel::kernel_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    matrix: Tensor | None,
    mass: Tensor | None,
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
    masses, low = _beside_tokens(q, mass, starts, matrix, heads)
    room = call.empty_states(k, v, length)
    launch(
        states.write_keys,
        call.grid("write_keys", k, length),
        *(k, v, *masses, *room, *strides(k), *strides(v)),
        *(length, start, heads, call.segments(length), low),
        MASSES=mass is not None,
        **call.options("write_keys", v, starts),
    )
    first = (first_sums, first_norms, first_logs)
    sums, norms, logs = call.pass_on(room, first, starts, length, reverse=False)
    queries = q.shape[2]
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    inverse = out.new_empty(q.shape[:3], dtype=torch.float32)
    scale = inverse.new_empty(*k.shape[:2], queries if call.phi.unbounded else 0)
    if queries:
        launch(
            kernels.read,
            call.grid("read", k, queries),
            *(q, k, v, *masses, sums, norms, logs, out, inverse, scale),
            *(*strides(q), *strides(k), *strides(v)),
            *(queries, start, heads, call.segments(queries), call.segments(length), low),
            G=call.group,
            CAUSAL=causal,
            NORMALIZE=normalize,
            MASSES=mass is not None,
            **call.options("read", v, starts),
        )
    last = (sums[:, :, -1].clone(), norms[:, :, -1].clone(), logs[:, :, -1].clone())
    return out, inverse, scale, sums, norms, logs, *last


@_forward.register_fake
def _(q, k, v, matrix, mass, starts, first_sums, first_norms, first_logs, *form):
    call = Call.of(q, k, v, matrix, *form)
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    inverse = out.new_empty(q.shape[:3], dtype=torch.float32)
    scale = inverse.new_empty(*k.shape[:2], q.shape[2] if call.phi.unbounded else 0)
    sums, norms, logs = call.empty_states(k, v, k.shape[2])
    last = (torch.empty_like(x[:, :, -1], memory_format=torch.contiguous_format) for x in (sums, norms, logs))
    return out, inverse, scale, sums, norms, logs, *last


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the matrix, the mass and the first state's sums and normalizers; empty where unwanted."""
    call = Call.of(q, k, v, matrix, feature_map, components, causal, normalize, start)
    q, k, v, grad = rows_together(q), rows_together(k), rows_together(v), rows_together(grad)
    length, queries, heads = k.shape[2], q.shape[2], k.shape[1]
    masses, low = _beside_tokens(q, mass, starts, matrix, heads)
    rows, group = call.phi.rows, {"G": call.group if queries else 0, "CAUSAL": causal}
    # A row without queries of its own hands the last state's gradient to its keys, segment by segment.
    span = length if causal else queries
    room = call.empty_states(k, v, span)
    group["MASSES"] = mass is not None
    reads = (*strides(q), *strides(k), *strides(v), *strides(grad))
    dq = call.parts("pull_queries", q, q.shape[-1])
    dy_q = call.parts("pull_queries", q, rows if learned else 0)
    drifts = call.parts("pull_queries", inverse, 1) if normalize else torch.zeros_like(inverse)[None]
    if queries:
        launch(
            query_kernels.pull_queries,
            call.grid("pull_queries", k, queries),
            *(q, k, v, grad, *masses, sums, norms, logs, out, inverse, drifts, dq, dy_q, *reads),
            *(queries, start, heads, call.segments(queries), call.segments(length), low),
            q.shape[0] * q.shape[1] * queries,
            NORMALIZE=normalize,
            LEARNED=learned,
            **group,
            **call.options("pull_queries", v, starts),
        )
    drift = total(drifts, drifts)
    if queries:
        launch(
            query_kernels.write_queries,
            call.grid("write_queries", k, queries),
            *(q, grad, inverse, drift, scale, *masses[1:], *room, *strides(q), *strides(grad)),
            *(queries, start, heads, call.segments(queries), low),
            G=group["G"],
            CAUSAL=causal,
            **call.options("write_queries", v, starts),
        )
    else:
        for part, nothing in zip(room, (0.0, 0.0, EMPTY)):
            part.fill_(nothing)
        scale = torch.full(k.shape[:3], EMPTY, dtype=torch.float32, device=k.device)
    # A last state without keys has gradients and no scale: they go to nothing.
    empty = last_logs <= EMPTY / 2
    outer = (
        grad_sums.masked_fill(empty[..., None, None], 0.0).contiguous(),
        grad_norms.masked_fill(empty[..., None], 0.0).contiguous(),
        torch.where(empty, EMPTY, -last_logs),
    )
    pulled = call.pass_on(room, outer, starts, span, reverse=True)

    dk = call.parts("pull_keys", k, k.shape[-1])
    dy_k = call.parts("pull_keys", k, rows if learned else 0)
    dv = v.new_empty(v.shape)
    blocks = call.tiles.blocks("pull_values")
    dmass = inverse.new_empty((blocks, *k.shape[:3]) if mass is not None else (blocks, 0))
    of_queries = (*pulled, inverse, drift, scale)
    lengths = (length, start, heads, call.segments(length), call.segments(span))
    sizes = (*lengths, low, k.shape[0] * heads * length)
    launch(
        key_kernels.pull_values,
        call.grid("pull_values", k, length),
        *(q, k, v, grad, *masses, *of_queries, dv, dmass, *reads, *sizes),
        **group,
        **call.options("pull_values", v, starts),
    )
    launch(
        key_kernels.pull_keys,
        call.grid("pull_keys", k, length),
        *(q, k, v, grad, *masses, *of_queries, dk, dy_k, *reads, *sizes),
        LEARNED=learned,
        **group,
        **call.options("pull_keys", v, starts),
    )
    dmatrix = _matrix_gradient(matrix, q, k, dy_q, dy_k) if learned and matrix is not None else q.new_empty(0)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        # Sums are those of the first state times exp(its log scale).
        factor = torch.exp(first_logs + pulled[2][:, :, -1])
        dfirst = (pulled[0][:, :, -1] * factor[..., None, None], pulled[1][:, :, -1] * factor[..., None])
    return total(dq, q), total(dk, k), dv, dmatrix, total(dmass, dmass), *dfirst


@_backward.register_fake
def _(grad, grad_sums, grad_norms, q, k, v, matrix, mass, starts, first_logs, *rest):
    learned = rest[7]
    dmatrix = torch.empty_like(matrix) if learned and matrix is not None else q.new_empty(0)
    dmass = q.new_empty(k.shape[:3] if mass is not None else (0,), dtype=torch.float32)
    dfirst = (q.new_empty(0), q.new_empty(0))
    if first_logs is not None:
        dfirst = (torch.empty_like(grad_sums), torch.empty_like(grad_norms))
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dmatrix, dmass, *dfirst)


def _matrix_gradient(matrix: Tensor, q: Tensor, k: Tensor, dy_q: Tensor, dy_k: Tensor) -> Tensor:
    """sum over tokens of dy x^T: (M, d) or (H_kv, M, d)."""
    heads = k.shape[1]
    of_keys = torch.einsum("bhnm,bhnd->hmd", total(dy_k, k), k)
    grouped = (total(dy_q, q).unflatten(1, (heads, -1)), q.unflatten(1, (heads, -1)))
    of_queries = torch.einsum("bhgnm,bhgnd->hmd", *grouped)
    per_head = (of_keys.float() + of_queries.float()).to(matrix.dtype)
    return per_head.sum(0) if matrix.dim() == 2 else per_head


def _keep(ctx, inputs, output) -> None:
    q, k, v, matrix, mass, starts, first_sums, _, first_logs, *form = inputs
    out, inverse, scale, sums, norms, logs, *_, last_logs = output
    ctx.form, ctx.continues = form, first_sums is not None
    ctx.mark_non_differentiable(inverse, scale, sums, norms, logs, last_logs)
    ctx.save_for_backward(
        q, k, v, matrix, mass, starts, first_logs, out, inverse, scale, sums, norms, logs, last_logs
    )


def _pull_back(ctx, grad, *grads):
    learned = ctx.needs_input_grad[3]
    dq, dk, dv, dmatrix, dmass, dsums, dnorms = torch.ops.megakernel.kernel_attention_backward(
        grad, grads[5], grads[6], *ctx.saved_tensors, learned, *ctx.form
    )
    wanted = ctx.needs_input_grad
    return (
        *(dq, dk, dv, dmatrix if learned else None, dmass if wanted[4] else None, None),
        *((dsums, dnorms) if ctx.continues else (None, None)),
        *(None,) * (1 + len(ctx.form)),
    )


_forward.register_autograd(_pull_back, setup_context=_keep)
