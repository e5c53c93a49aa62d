"""One decoding step of FLuRKA in one launch: attend to the window and the landmarks, and update the state.

The tail always has b * blocks tokens; a step appends the token and drops the oldest. The kernel derives from the
position, on the device, where the window begins, whether the token sees landmarks and whether it ends a block. No
shape, argument or host decision changes from token to token, so a CUDA graph can capture the step after one warm-up
step (which compiles kernels and makes the table of angles).
"""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.documents import token_positions
from megakernel.ops.feature_maps import Map, named
from megakernel.ops.flurka_attention import decode_kernel
from megakernel.ops.flurka_attention.arguments import MergeParams, NearParams, Pools, Window
from megakernel.ops.flurka_attention.options import FlurkaInputs
from megakernel.ops.kernel_attention.decode import TILE, unsupported_gradient
from megakernel.ops.kernel_attention.triton import unsupported_tiles
from megakernel.ops.kernels.arguments import Rows
from megakernel.ops.kernels.feature_maps import phi_of
from megakernel.ops.kernels.launch import launch
from megakernel.ops.kernels.primitives import cdiv, padded
from megakernel.ops.projections import dense
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail

WIDEST = 128
"""Largest d, D, M and b; beyond that, a program's tiles do not fit into registers."""

HIGHEST_RANK = 32
"""Largest r, for the same reason."""

KEYS = 32
"""Tokens of a window per step of the kernel's loop."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> str | None:
    """Why the kernel does not support these arguments of a layer that FLuRKA's other kernels support, or None."""
    weights, far, tail = inputs.weights, inputs.far, inputs.tail
    if q.shape[2] != 1:
        return f"q has {q.shape[2]} tokens; expected 1"
    if far is None or tail is None or inputs.exchange is not None:
        return "the token continues no state of this process; expected an initial_state and no exchange"
    if far.sums.dtype != torch.float32:
        return f"the state is {far.sums.dtype}; expected float32"
    if (reason := unsupported_tiles(q, v, weights.projection, WIDEST, WIDEST)) is not None:
        return reason
    rank, block_size = weights.pool_keys.shape[-2:]
    if block_size > WIDEST or rank > HIGHEST_RANK:
        most = f"{WIDEST} and {HIGHEST_RANK}"
        return f"blocks have {block_size} tokens and {rank} landmarks; expected at most {most}"
    return unsupported_gradient(q, k, v, inputs.gate, inputs.log_decay, *far, *tail, *weights)


def step(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> tuple[Tensor, KernelState, Tail]:
    """Same arguments and results as `chunked.attend`, for one token.

    `far` and `tail` are not modified: programs of other columns read them, and a caller may reuse them (beams, a
    rejected draft). If the weights of landmarks add up to less than float32's smallest normal number, the far part is
    0; this is not checked, because checking would synchronize with the GPU.
    """
    options, weights, gate, positions, far, tail, _, log_decay, _ = inputs
    assert far is not None
    assert tail is not None
    feature_map = named(options.feature_map)
    rotary: Any = options.near_rotary
    reach = options.block_size * options.blocks
    table = None if rotary is None else rotary.rotary.table(-reach, reach + KEYS, q.device)
    out, *state = _step(
        *(q, k, v, gate),
        token_positions(positions, 1, q.device).expand(len(q), 1),
        *(*far, *tail),
        dense(weights.projection, q.shape[-1]),
        *(weights.pool_keys, weights.pool_values, weights.far_mass, weights.far_weight),
        *(weights.gate_weight, table, log_decay),
        *(feature_map.name, feature_map.components, options.near, options.blocks),
    )
    return out, KernelState(*state[:2]), Tail(*state[2:])


@torch.library.custom_op("megakernel::flurka_attention_step", mutates_args=())
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    positions: Tensor,
    sums: Tensor,
    log_scale: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    matrix: Tensor | None,
    pool_keys: Tensor,
    pool_values: Tensor,
    far_mass: Tensor | None,
    far_weight: Tensor | None,
    gate_weight: Tensor | None,
    table: Tensor | None,
    log_decay: Tensor | None,
    feature_map: str,
    components: int,
    near: str,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, sums and log scales of the new far state, and keys and values of the new tail."""
    batch, heads, _, width = k.shape
    group, columns = q.shape[1] // heads, v.shape[-1]
    rank, block_size = pool_keys.shape[-2:]
    reach = block_size * blocks
    if matrix is not None:
        matrix = matrix.float().contiguous()
    rows = None if matrix is None else matrix.shape[-2]
    phi = phi_of(Map(feature_map, components), width, rows, log_decay is not None)
    near_options = NearParams(
        near == "softmax", gate is not None, table is not None, blocks, block_size, width
    )
    outputs = _empty_outputs(q, k, v, gate, positions, sums, log_scale, tail_keys, tail_values)
    block = max(16, min(padded(columns), TILE // phi.padded_rows))
    grid = (batch * heads, cdiv(columns, block))

    def of_key_heads(x: Tensor) -> Rows:
        return Rows.of(x.reshape(batch, heads, group, -1))

    keys, values = Rows.of(tail_keys), Rows.of(tail_values)
    launch(
        decode_kernel.step,
        grid,
        of_key_heads(q),
        Rows.of(k),
        Rows.of(v),
        Window(keys, values, None, table, reach, -reach),
        Pools(
            pool_keys.float().contiguous(),
            pool_values.float().contiguous(),
            rank * block_size if pool_keys.dim() == 3 else 0,
            None,
        ),
        far_mass,
        q if matrix is None else matrix,
        matrix.stride(0) if matrix is not None and matrix.dim() == 3 else 0,
        MergeParams(
            None if gate is None else of_key_heads(gate),
            None if gate_weight is None else gate_weight.contiguous(),
            far_weight,
        ),
        positions,
        sums.contiguous(),
        log_scale.contiguous(),
        None if log_decay is None else log_decay.contiguous(),
        *outputs,
        sums.new_empty(*grid, rank, width),
        heads,
        positions.stride(0),
        warps=8 if phi.padded_rows * block > TILE // 2 else 4,
        G=group,
        C=padded(group),
        V=columns,
        BV=block,
        R=rank,
        RP=padded(rank),
        BP=padded(block_size),
        BK=KEYS,
        NEAR=near_options,
        PHI=phi,
    )
    return outputs


@_step.register_fake
def _empty_outputs(q, k, v, gate, positions, sums, log_scale, tail_keys, tail_values, *others: Any):
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    states = (sums, log_scale, tail_keys, tail_values)
    return out, *(x.new_empty(x.shape) for x in states)
