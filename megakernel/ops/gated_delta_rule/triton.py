"""The gated delta rule in Triton, registered as PyTorch operators.

Saved for backward are the inputs and X, C numbers per token. Backward recomputes the states that enter chunks: d D / C
numbers per token, and as many for their gradients.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.gated_delta_rule import chunked, kernels
from megakernel.ops.gated_delta_rule.kernels import CHUNK, DeltaInputs, DeltaShape
from megakernel.ops.kernel_attention.triton import (
    WIDEST,
    document_starts,
    unsupported_features,
    unsupported_tiles,
)
from megakernel.ops.kernels.launch import Rows, capability_of, launch
from megakernel.ops.kernels.primitives import cdiv, padded

WIDEST_FLOAT32 = 32
"""Largest d in float32, whose matrix products take three registers per element: wider tiles would spill."""

WIDEST_IN_REGISTERS = 64
"""Largest d on GPUs whose tensor cores read operands from registers (capability below 9 or from 12 on)."""

WIDEST_VALUES = 1024
"""Largest D, which keeps offsets inside a tile of tokens small; programs split the columns."""

MIN_STRENGTH = 1e-30
"""Smaller strengths are clamped to this, because gradients divide by them; such tokens write nothing anyway."""


class LaunchConfig(NamedTuple):
    """How a kernel is launched, over key heads or query heads."""

    columns: int
    """Columns of values per program. Kernels that go from chunk to chunk take few: heads alone do not fill a GPU."""

    by_query: bool = False
    by_chunk: bool = True
    by_column: bool = True
    warps: int = 4
    stages: int = 1
    """Chunks in flight from memory at once; one in float32, whose products need the registers."""


LAUNCH_CONFIGS = {
    "solve": LaunchConfig(64, by_column=False),
    "pass_on": LaunchConfig(32, by_chunk=False, stages=2),
    "read": LaunchConfig(64, by_query=True),
    "bwd_read": LaunchConfig(64),
    "bwd_pass_on": LaunchConfig(32, by_chunk=False, stages=2),
    "bwd_queries": LaunchConfig(32, by_query=True, by_column=False),
    "bwd_keys": LaunchConfig(32, by_column=False, warps=8),
}
"""Kernel -> how it is launched."""


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    max_width = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if not 90 <= (capability := capability_of(q.device)) < 120:
        if q.dtype == torch.float32:
            return f"q is {q.dtype} on a GPU of compute capability {capability / 10}; expected bfloat16"
        max_width = WIDEST_IN_REGISTERS
    return unsupported_features(q, "identity") or unsupported_tiles(q, v, None, max_width, WIDEST_VALUES)


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `chunked`, in bfloat16 or float32; single tokens run in PyTorch."""
    if q.shape[2] == 1:
        return chunked(q, k, v, log_decay, strength, positions, state)
    starts, start = document_starts(positions, q.shape[2])
    if starts is not None:
        starts = starts.expand(len(q), -1).contiguous()
    out, leaving, _ = _forward(q, k, v, log_decay, strength, starts, state, start)
    return out, leaving


class DeltaLauncher(NamedTuple):
    """Arguments shared by all launches of a call."""

    tokens: DeltaInputs
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
    ) -> "DeltaLauncher":
        """The launcher for arguments of the operators."""
        strength = strength.clamp(min=MIN_STRENGTH).contiguous()
        tokens = DeltaInputs(Rows.of(q), Rows.of(k), Rows.of(v), log_decay.contiguous(), strength, starts)
        return DeltaLauncher(tokens, start)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Launch a kernel."""
        q, k, v = (rows.pointer for rows in self.tokens[:3])
        (batch, heads, length, width), values = k.shape, v.shape[-1]
        options = LAUNCH_CONFIGS[kernel.__name__]
        sizes = (values, options.columns, q.shape[1] // heads)
        shape = DeltaShape(width, padded(width), *sizes, width**-0.5)
        grid = (
            batch
            * (q.shape[1] if options.by_query else heads)
            * (cdiv(length, CHUNK) if options.by_chunk else 1),
            *[cdiv(values, options.columns)] * options.by_column,
        )
        arguments = (self.tokens, *arguments, length, self.start, heads)
        stages = options.stages if k.element_size() == 2 else 1
        launch(kernel, grid, *arguments, SHAPE=shape, warps=options.warps, stages=stages)

    def pass_on(self, solved: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The states that enter chunks, U, and the last state."""
        k, values = self.tokens.k.pointer, state.shape[-1]
        states = k.new_empty(*k.shape[:2], cdiv(k.shape[2], CHUNK), k.shape[-1], values)
        state = state.contiguous()
        written, last = k.new_empty(*k.shape[:3], values), torch.empty_like(state)
        self.launch(kernels.pass_on, solved, state, states, written, last)
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
    """The output, the last state, and X (B, H_kv, N, C)."""
    launcher = DeltaLauncher.of(q, k, v, log_decay, strength, starts, start)
    out, _, solved = _empty_outputs(q, k, v, log_decay, strength, starts, state, start)
    launcher.launch(kernels.solve, solved)
    states, written, last = launcher.pass_on(solved, state)
    launcher.launch(kernels.read, states, written, out)
    return out, last, solved


@_forward.register_fake
def _empty_outputs(q, k, v, log_decay, strength, starts, state, start):
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
    launcher = DeltaLauncher.of(q, k, v, log_decay, strength, starts, start)
    gradients = _empty_gradients(grad, dlast, solved, q, k, v, log_decay, strength, starts, state, start)
    dq, *of_keys, dfirst = gradients
    states, written, _ = launcher.pass_on(solved, state)
    rows = Rows.of(grad)
    dwritten, r, dstates = torch.empty_like(written), torch.empty_like(written), torch.empty_like(states)
    launcher.launch(kernels.bwd_read, rows, dwritten)
    launcher.launch(kernels.bwd_pass_on, rows, solved, dwritten, dlast.contiguous(), dstates, r, dfirst)
    passing = k.new_empty(q.shape[:3], dtype=torch.float32)
    launcher.launch(kernels.bwd_queries, rows, states, written, dq, passing)
    launcher.launch(kernels.bwd_keys, rows, states, written, dstates, r, passing, *of_keys)
    return gradients


@_backward.register_fake
def _empty_gradients(grad, dlast, solved, q, k, v, log_decay, strength, starts, state, start):
    inputs = (q, k, v, log_decay, strength, state)
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)


def _setup_context(ctx, inputs, output):
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


_forward.register_autograd(_differentiate, setup_context=_setup_context)
