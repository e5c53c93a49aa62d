"""The gated delta rule by flash-linear-attention's Triton kernels, which hand over to FlashQLA's where it is installed.

Tokens come before heads there, and every query head has its key head. Documents are packed by their decays: that of a
document's first token is 0, so that it sees nothing of the state before it.

flash-linear-attention is optional, and imported when it first runs.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton
from packaging.version import Version
from torch import Tensor

from megakernel.config.extras import install
from megakernel.ops.documents import Positions
from megakernel.ops.gated_delta_rule import chunked
from megakernel.ops.kernel_attention.triton import unsupported_features, unsupported_tiles
from megakernel.ops.kernels.assembler import WGMMA_CAPABILITIES
from megakernel.ops.kernels.launch import capability_of, is_recording

RELEASE = "0.6"
"""The release of flash-linear-attention whose functions and numbers tests know."""

FIRST_TRITON = Version("3.7.1")
"""The first whose backward of these kernels is right for WGMMA_CAPABILITIES (flash-linear-attention, issue 640)."""

FIRST_FLASH_QLA = Version("0.1.3")
"""The first that does not round a part of the gradient of decays to bfloat16 (FlashQLA, pull request 28)."""

WIDEST = 256
"""Largest d."""

WIDEST_VALUES = 1024
"""Largest D."""

MOST_HEADS = 2**16 - 1
"""Most sequences x heads, which are an axis of the grids of programs."""

CHUNK = 64

FORGETTING = -105.0
"""A log decay whose factor is 0 in float32. Chunks sum log decays in float32, so it is no smaller than it has to be."""


def _problem() -> str | None:
    """Why what is installed cannot be used."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return f"flash-linear-attention is not installed: {install('gpu')}"
    if not found.startswith(f"{RELEASE}."):
        return f"flash-linear-attention is {found}; expected {RELEASE}: {install('gpu')}"
    try:
        flash_qla = version("flash-qla")
    except PackageNotFoundError:
        return None
    if Version(flash_qla) < FIRST_FLASH_QLA and os.environ.get("FLA_FLASH_QLA") != "0":
        return (
            f"flash-qla {flash_qla} rounds gradients of decays to bfloat16; expected at least {FIRST_FLASH_QLA}, or "
            "FLA_FLASH_QLA=0 in the environment"
        )
    return None


PROBLEM = _problem()
"""Found once, because it is asked at every call, and torch.compile traces it."""

HAS_OLD_TRITON = Version(triton.__version__) < FIRST_TRITON


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    if PROBLEM is not None and not is_recording():
        return PROBLEM
    if HAS_OLD_TRITON and (capability := capability_of(q.device)) in WGMMA_CAPABILITIES:
        return (
            f"Triton {triton.__version__} computes wrong gradients of flash-linear-attention's kernels on compute "
            f"capability {capability / 10}; expected at least {FIRST_TRITON}"
        )
    if q.dtype == torch.float32 and (q.is_cuda or is_recording()):
        return "q is torch.float32, whose products flash-linear-attention rounds to TF32; expected bfloat16"
    if (rows := q.shape[0] * q.shape[1]) > MOST_HEADS:
        return f"{q.shape[0]} sequences of {q.shape[1]} heads are {rows}; expected at most {MOST_HEADS}"
    return unsupported_features(q, "identity") or unsupported_tiles(q, v, None, WIDEST, WIDEST_VALUES)


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, positions: Positions, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `chunked`, in bfloat16; single tokens run in PyTorch."""
    if q.shape[2] == 1:
        return chunked(q, k, v, log_decay, strength, positions, state)
    if not isinstance(positions, int):
        log_decay = log_decay.masked_fill((positions == 0)[:, None], FORGETTING)
    elif positions == 0:
        state = torch.zeros_like(state)
    group = q.shape[1] // k.shape[1]
    tokens = (q.transpose(1, 2), *(_for_queries(x, group) for x in (k, v, log_decay, strength)))
    state = state.repeat_interleave(group, 1)
    if torch.compiler.is_compiling() or is_recording():
        out, last, *_ = _forward(*tokens, state)
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        out, last = chunk_gated_delta_rule(*tokens, initial_state=state, output_final_state=True)
    return out.transpose(1, 2), last[:, ::group]


def _for_queries(x: Tensor, group: int) -> Tensor:
    """(B, H_kv, N, ...) -> (B, N, H_kv * group, ...), each key head repeated."""
    x = x.transpose(1, 2)[:, :, :, None]
    return x.expand(*x.shape[:3], group, *x.shape[4:]).flatten(2, 3)


# flash-linear-attention's function breaks graphs of torch.compile, and its kernels cannot be recorded: there, this
# operator calls what that function calls.


@torch.library.custom_op("megakernel::gated_delta_rule", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, the last state, and for backward sums of log decays and inverses (B, N, H, C) of chunks."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd
    from fla.utils import input_guard

    sums, out, inverses, last, *_ = input_guard(chunk_gated_delta_rule_fwd)(
        q, k, v, log_decay, strength, q.shape[-1] ** -0.5, state, True
    )
    return out, last, sums, inverses


@_forward.register_fake
def _empty_outputs(q, k, v, log_decay, strength, state):
    shape = q.shape[:3]
    return (
        v.new_empty(*shape, v.shape[-1]),
        state.new_empty(state.shape),
        log_decay.new_empty(shape),
        k.new_empty(*shape, CHUNK),
    )


@torch.library.custom_op("megakernel::gated_delta_rule_backward", mutates_args=())
def _backward(
    grad: Tensor,
    dlast: Tensor,
    sums: Tensor,
    inverses: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strength: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, log decays, strengths and the first state."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd
    from fla.utils import input_guard

    dq, dk, dv, dstrength, dlog, dstate, *_ = input_guard(chunk_gated_delta_rule_bwd)(
        q, k, v, sums, strength, inverses, q.shape[-1] ** -0.5, state, grad, dlast
    )
    return dq, dk, dv, dlog, dstrength, dstate


@_backward.register_fake
def _empty_gradients(grad, dlast, sums, inverses, q, k, v, strength, state):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, sums, strength, state))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, _, strength, state = inputs
    _, _, sums, inverses = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(sums, inverses, q, k, v, strength, state)


def _differentiate(ctx: Any, grad: Tensor | None, dlast: Tensor | None, *_: None) -> tuple[Tensor, ...]:
    *_, v, _, state = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    return _backward(grad, torch.zeros_like(state) if dlast is None else dlast, *ctx.saved_tensors)


_forward.register_autograd(_differentiate, setup_context=_setup_context)
