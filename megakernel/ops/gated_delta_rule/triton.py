"""The gated delta rule by Triton kernels, as operators that torch knows.

Backward keeps the inputs and X, C numbers a token, and makes the states that enter chunks again: d D / C numbers a
token, and as many of their gradients.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.gated_delta_rule import chunked, kernels
from megakernel.ops.gated_delta_rule.kernels import CHUNK, DeltaShape, Tokens
from megakernel.ops.kernel_attention.triton import (
    WIDEST,
    document_starts,
    unsupported_features,
    unsupported_tiles,
)
from megakernel.ops.kernels.features import cdiv, padded
from megakernel.ops.kernels.launch import Rows, capability_of, launch

WIDEST_FLOAT32 = 32
"""d in float32, whose products take three registers for a number: more would go to local memory."""

WIDEST_IN_REGISTERS = 64
"""d on GPUs whose tensor cores take factors from registers, those before capability 9 and from 12 on: likewise."""

WIDEST_VALUES = 1024
"""D up to which offsets inside a tile of tokens stay small; programs share columns."""

LOWEST = -30.0
"""Logs of decays below are taken for it, which leaves nothing: sums of longer ones would lose those of the others."""

LEAST = 1e-30
"""Strengths below are taken for it: gradients divide by them, and a token that writes so little writes nothing."""


class Grid(NamedTuple):
    """How a kernel is launched, over key heads or query heads."""

    columns: int
    """Of values, that a program has at once. Few of one that goes from chunk to chunk: heads alone fill no GPU."""

    by_query: bool = False
    by_chunk: bool = True
    by_column: bool = True
    warps: int = 4


GRIDS = {
    "solve": Grid(64, by_column=False),
    "pass_on": Grid(32, by_chunk=False),
    "read": Grid(64, by_query=True),
    "bwd_read": Grid(64),
    "bwd_pass_on": Grid(32, by_chunk=False),
    "bwd_queries": Grid(32, by_query=True, by_column=False),
    "bwd_keys": Grid(32, by_column=False, warps=8),
}
"""Kernel -> its grid."""


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> str | None:
    """Why the kernels cannot take these arguments of `attend`; None where they can."""
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if not 90 <= (capability := capability_of(q.device)) < 120:
        if q.dtype == torch.float32:
            return f"q is {q.dtype} on a GPU of compute capability {capability / 10}; expected bfloat16"
        most = WIDEST_IN_REGISTERS
    return unsupported_features(q, "identity") or unsupported_tiles(q, v, None, most, WIDEST_VALUES)


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Arguments and results of `chunked`, in bfloat16 or float32; the products of one token are torch's."""
    if q.shape[2] == 1:
        return chunked(q, k, v, log_decay, strength, positions, state)
    starts, start = document_starts(positions, q.shape[2])
    if starts is not None:
        starts = starts.expand(len(q), -1).contiguous()
    out, leaving, _ = _forward(q, k, v, log_decay, strength, starts, state, start)
    return out, leaving


class Call(NamedTuple):
    """What all launches of a call take."""

    tokens: Tokens
    start: int

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        strength: Tensor,
        starts: Tensor | None,
        start: int,
    ) -> "Call":
        """Arguments as of the operators."""
        numbers = log_decay.clamp(min=LOWEST).contiguous(), strength.clamp(min=LEAST).contiguous()
        return Call(Tokens(Rows.of(q), Rows.of(k), Rows.of(v), *numbers, starts), start)

    def begin(self, kernel: Any, *given: Any) -> None:
        """Start a kernel."""
        q, k, v = (rows.pointer for rows in self.tokens[:3])
        (batch, heads, length, width), values = k.shape, v.shape[-1]
        form = GRIDS[kernel.__name__]
        blocks = cdiv(values, form.columns)
        sizes = (values, form.columns, q.shape[1] // heads)
        grid = [batch * (q.shape[1] if form.by_query else heads)]
        grid = [cdiv(length, CHUNK)] * form.by_chunk + grid + [blocks] * form.by_column
        shape = DeltaShape(width, padded(width), *sizes, width**-0.5)
        whole = (self.tokens, *given, length, self.start, heads)
        launch(kernel, tuple(grid), *whole, SHAPE=shape, warps=form.warps)

    def pass_on(self, solved: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states that enter chunks, U, and the last state."""
        k, values = self.tokens.k.pointer, state.shape[-1]
        states = k.new_empty(*k.shape[:2], cdiv(k.shape[2], CHUNK), k.shape[-1], values)
        state = state.contiguous()
        written, last = k.new_empty(*k.shape[:3], values), torch.empty_like(state)
        self.begin(kernels.pass_on, solved, state, states, written, last)
        return states, written, last


@torch.library.custom_op("megakernel::gated_delta_rule", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    starts: Tensor | None,
    state: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the state that leaves, and X (B, H_kv, N, C)."""
    call = Call.of(q, k, v, log_decay, strength, starts, start)
    out, _, solved = _outputs(q, k, v, log_decay, strength, starts, state, start)
    call.begin(kernels.solve, solved)
    states, written, last = call.pass_on(solved, state)
    call.begin(kernels.read, states, written, out)
    return out, last, solved


@_forward.register_fake
def _outputs(q, k, v, log_decay, strength, starts, state, start):
    return (
        v.new_empty(*q.shape[:3], v.shape[-1]),
        torch.empty_like(state, memory_format=torch.contiguous_format),
        k.new_empty(*k.shape[:3], CHUNK),
    )


@torch.library.custom_op("megakernel::gated_delta_rule_backward", mutates_args=())
def _backward(
    grad: Tensor,
    dlast: Tensor,
    solved: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    starts: Tensor | None,
    state: Tensor,
    start: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, decays, strengths and the first state."""
    call = Call.of(q, k, v, log_decay, strength, starts, start)
    found = _gradients(grad, dlast, solved, q, k, v, log_decay, strength, starts, state, start)
    dq, *of_keys, dfirst = found
    states, written, _ = call.pass_on(solved, state)
    rows = Rows.of(grad)
    dwritten, r, dstates = torch.empty_like(written), torch.empty_like(written), torch.empty_like(states)
    call.begin(kernels.bwd_read, rows, dwritten)
    call.begin(kernels.bwd_pass_on, rows, solved, dwritten, dlast.contiguous(), dstates, r, dfirst)
    passing = k.new_empty(q.shape[:3], dtype=torch.float32)
    call.begin(kernels.bwd_queries, rows, states, written, dq, passing)
    call.begin(kernels.bwd_keys, rows, states, written, dstates, r, passing, *of_keys)
    return found


@_backward.register_fake
def _gradients(grad, dlast, solved, q, k, v, log_decay, strength, starts, state, start):
    given = (q, k, v, log_decay, strength, state)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)


def _save(ctx, inputs, output):
    *tensors, ctx.start = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2], *tensors)


def _differentiate(ctx, grad, dlast, _):
    solved, *tensors = ctx.saved_tensors
    q, _, v, *_, state = tensors
    grad = v.new_zeros(*q.shape[:3], v.shape[-1]) if grad is None else grad
    dlast = torch.zeros_like(state) if dlast is None else dlast
    *of_tokens, dfirst = _backward(grad, dlast, solved, *tensors, ctx.start)
    return *of_tokens, None, dfirst, None


_forward.register_autograd(_differentiate, setup_context=_save)
