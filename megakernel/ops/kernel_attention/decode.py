"""One decoding step of kernel attention in one launch: add the token to the state, then read the state."""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.feature_maps import Map, named
from megakernel.ops.kernel_attention import decode_kernel
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.kernels.feature_maps import SUPPORTED, phi_of
from megakernel.ops.kernels.launch import contiguous_rows, launch
from megakernel.ops.kernels.primitives import cdiv, padded
from megakernel.ops.projections import FastFood, dense, rows_of
from megakernel.ops.state import KernelState

WIDEST = 512
"""Largest number of features per half."""

TILE = 8192
"""Largest number of elements of half a state per program: 32 in each of 256 threads."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> str | None:
    """Why the kernel does not support these arguments of `step`; None if it does."""
    feature_map, projection, state = named(options.feature_map), options.projection, options.initial_state
    begins = isinstance(options.positions, int) and options.positions == 0
    if not options.causal or begins or state is None or options.exchange is not None:
        return (
            "the token continues no state of this process; expected causal, an initial_state and no exchange"
        )
    if options.priors is not None:
        return "priors are given; expected one key per position"
    if q.shape[2] != 1:
        return f"q has {q.shape[2]} tokens; expected 1"
    if feature_map.name not in SUPPORTED or feature_map.smoothing:
        return f"feature_map={feature_map}; expected one of {', '.join(SUPPORTED)} without smoothing"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or state.sums.dtype != torch.float32:
        return f"q is {q.dtype} and the state {state.sums.dtype}; expected at most float32, and float32"
    if (rows := rows_of(projection, q.shape[-1])) > WIDEST:
        return f"{feature_map.name} has {rows} features in a half; expected at most {WIDEST}"
    return unsupported_gradient(q, k, v, options.key_weights, *state, projection)


def unsupported_gradient(*inputs: Tensor | FastFood | None) -> str | None:
    """Why a decoding step cannot take these inputs: one of them requires a gradient. None if it can."""
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad
        for each in inputs
        for x in (each if isinstance(each, FastFood) else (each,))
    ):
        return "an input requires a gradient; expected none, as under torch.no_grad()"
    return None


def step(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState]:
    """Outputs (B, H, 1, D) of q (B, H, 1, d), and the state after adding k and v (B, H_kv, 1, ...).

    Positions are one number above 0 or (B, 1): a token at position 0 begins a document, which the kernel checks on the
    device. `initial_state` is not modified: programs of several columns read its normalizer while one writes the new
    one, and a caller may reuse the old state (beams, a rejected draft).
    """
    assert options.initial_state is not None
    feature_map, positions = named(options.feature_map), options.positions
    out, *state = _step(
        *(q, k, v, *options.initial_state, dense(options.projection, q.shape[-1]), options.key_weights),
        positions if isinstance(positions, Tensor) else None,
        *(feature_map.name, feature_map.components, options.normalize),
    )
    return out, KernelState(*state)


@torch.library.custom_op("megakernel::kernel_attention_step", mutates_args=())
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sums: Tensor,
    log_scale: Tensor,
    matrix: Tensor | None,
    key_weights: Tensor | None,
    positions: Tensor | None,
    feature_map: str,
    components: int,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, sums and log scales of the new state."""
    batch, heads, _, width = k.shape
    group, columns = q.shape[1] // heads, v.shape[-1]
    # A copy of a few kilobytes: with the key as one more row, one tile has the features of queries and key.
    tokens = torch.cat([q.reshape(batch, heads, group, width), k], 2)
    if matrix is not None:
        matrix = matrix.float().contiguous()
    phi = phi_of(Map(feature_map, components), width, None if matrix is None else matrix.shape[-2])
    outputs = _empty_outputs(q, k, v, sums, log_scale)
    v = contiguous_rows(v)
    block = max(16, min(padded(columns), TILE // phi.padded_rows))
    launch(
        decode_kernel.step,
        (batch * heads, cdiv(columns, block)),
        tokens,
        v,
        log_scale if key_weights is None else key_weights.float().contiguous(),
        tokens if matrix is None else matrix,
        sums.contiguous(),
        log_scale.contiguous(),
        *outputs,
        positions,
        v.stride(0),
        v.stride(1),
        matrix.stride(0) if matrix is not None and matrix.dim() == 3 else 0,
        heads,
        0 if positions is None else positions.stride(0),
        warps=8 if phi.padded_rows * block > TILE // 2 else 4,
        G=group,
        C=padded(group + 1),
        V=columns,
        BV=block,
        WEIGHTED=key_weights is not None,
        NORMALIZE=normalize,
        PHI=phi,
    )
    return outputs


@_step.register_fake
def _empty_outputs(q, k, v, sums, log_scale, *others: Any):
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    return out, sums.new_empty(sums.shape), log_scale.new_empty(log_scale.shape)
