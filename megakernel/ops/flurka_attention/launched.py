"""The op of FLuRKA's kernels as torch knows it: its launches forward, and what goes from there to `backward`."""

import torch
from torch import Tensor

from megakernel.ops.flurka_attention import backward, pool_kernels, read_kernel
from megakernel.ops.flurka_attention.launches import Call, Inputs, Shape
from megakernel.ops.kernel_attention.launches import given_or_zeros
from megakernel.ops.kernels.launch import strides


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
]:
    """What `read_kernel.read` and `pool_kernels.pool` give; the states of all segments; the last state."""
    shape = Shape(feature_map, components, near, blocks, start, before, oldest)
    call = Call.of(q, k, v, matrix, pool_keys, gate, table, starts, windows, shape)
    given = Inputs.of(
        q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, table, starts, windows, ends
    )
    marks, room = call.empty_marks(k), call.empty_states(k)
    of_tokens = (*strides(given.k), *strides(given.v))
    sizes = (call.length, start, oldest, before, call.heads, call.segments, call.chunks)
    call.carry(
        pool_kernels.pool,
        *(given.k, given.v, given.pool_keys, given.pool_values, given.mass, given.starts, given.ends),
        *(given.wide_matrix, *marks, *room, *of_tokens, given.pool_head, *sizes),
    )
    sums, norms, logs = call.pass_on(room, (first_sums, first_norms, first_logs), starts, reverse=False)
    outputs = _empty_outputs(call, q, v)
    if q.shape[2]:
        call.carry(
            read_kernel.read,
            *(given.q, given.k, given.v, given.gate, given.far_weight, given.mass),
            *(given.starts, given.windows, given.ends, given.matrix, given.table),
            *(*marks[1:], sums, norms, logs, *outputs),
            *(*strides(given.q), *of_tokens, *sizes, given.low),
        )
    last = (sums[:, :, -1].clone(), norms[:, :, -1].clone(), logs[:, :, -1].clone())
    return *outputs, *marks, sums, norms, logs, *last


def _empty_outputs(call: Call, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the output, factor, peak and r; the latter are empty where nobody needs them."""
    out = v.new_empty(*q.shape[:3], call.values)
    factor = out.new_empty(q.shape[:3], dtype=torch.float32)
    peak = factor.new_empty(q.shape[:3] if call.shape.near == "softmax" else 0)
    return out, factor, peak, factor.new_empty(*v.shape[:2], q.shape[2] if call.phi.unbounded else 0)


@forward.register_fake
def _(q, k, v, matrix, pool_keys, pool_values, mass, gate, far_weight, table, starts, windows, *rest):
    call = Call.of(q, k, v, matrix, pool_keys, gate, table, starts, windows, Shape(*rest[4:]))
    states = call.empty_states(k)
    last = (torch.empty_like(x[:, :, -1], memory_format=torch.contiguous_format) for x in states)
    return *_empty_outputs(call, q, v), *call.empty_marks(k), *states, *last


def _keep(ctx, inputs, output) -> None:
    *tensors, first_sums, _, first_logs = inputs[:16]
    ctx.shape, ctx.continues = inputs[16:], first_sums is not None
    ctx.set_materialize_grads(False)
    out, *kept, _, _, last_logs = output
    ctx.mark_non_differentiable(*kept, last_logs)
    ctx.save_for_backward(*tensors, first_logs, out, *kept, last_logs)


def _pull_back(ctx, grad, *grads):
    wanted, kept = ctx.needs_input_grad, ctx.saved_tensors
    outer = given_or_zeros((grad, grads[10], grads[11]), kept[14], *(x[:, :, -1] for x in kept[-4:-2]))
    *found, dsums, dnorms = backward.backward(*outer, *kept, wanted[3], *ctx.shape)
    return (
        *(x if needed else None for x, needed in zip(found, wanted)),
        *(None,) * 4,
        *((dsums, dnorms) if ctx.continues else (None, None)),
        *(None,) * (1 + len(ctx.shape)),
    )


forward.register_autograd(_pull_back, setup_context=_keep)
