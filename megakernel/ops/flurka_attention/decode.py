"""One token of FLuRKA: it attends its window and the landmarks, and enters the state of its sequence, in one launch.

A tail has b * blocks tokens from the first call on, and the step gives one of that size: the old one without its oldest
token. Where a window begins, whether the token sees landmarks and whether it ends a block the kernel reads from the
position on the device, so that no shape, no argument and no decision of the host changes from token to token: a CUDA
graph captures the step behind one that warms it up (compiled kernels, the table of angles).
"""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.documents import token_positions
from megakernel.ops.feature_maps import FeatureMap, named
from megakernel.ops.flurka_attention import decode_kernel
from megakernel.ops.flurka_attention.arguments import Near, Pools, Shares, Window
from megakernel.ops.flurka_attention.form import FlurkaInputs
from megakernel.ops.kernel_attention.arguments import Rows
from megakernel.ops.kernel_attention.decode import TILE
from megakernel.ops.kernel_attention.triton import unsupported_tiles
from megakernel.ops.kernels.features import cdiv, padded, phi_of
from megakernel.ops.kernels.launch import launch
from megakernel.ops.projections import dense
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail

WIDEST = 128
"""d, D, M and b up to which a program's tiles fit into registers."""

HIGHEST_RANK = 32
"""r likewise."""

KEYS = 32
"""Tokens of a window that a program compares at a time."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> str | None:
    """Why the kernel cannot take these arguments of `attend`, of a layer whose form FLuRKA's kernels take."""
    weights, far, tail = inputs.weights, inputs.far, inputs.tail
    if q.shape[2] != 1:
        return f"q has {q.shape[2]} tokens; expected 1"
    if far is None or tail is None or inputs.exchange is not None:
        return "the token begins a shard; expected one that continues a state of this process"
    if far.sums.dtype != torch.float32:
        return f"the state is {far.sums.dtype}; expected float32"
    tiles = unsupported_tiles(q, v, weights.projection, WIDEST, WIDEST)
    if tiles is not None:
        return tiles
    rank, block_size = weights.pool_keys.shape[-2:]
    if block_size > WIDEST or rank > HIGHEST_RANK:
        most = f"{WIDEST} and {HIGHEST_RANK}"
        return f"blocks have {block_size} tokens and {rank} landmarks; expected at most {most}"
    tensors = (q, k, v, inputs.gate, inputs.log_decay, *far, *tail, *weights)
    parts = [x for part in tensors for x in (part if isinstance(part, tuple) else (part,))]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in parts):
        return "a gradient is wanted; expected none, as under torch.no_grad()"
    return None


def step(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> tuple[Tensor, KernelState, Tail]:
    """Arguments and results of `chunked.attend`, for one token.

    `far` and `tail` are left as they were: programs of other columns read them, and a caller may go on from them again
    (beams, a rejected draft). Weights of landmarks that add up to less than float32's smallest normal number are
    nothing, and the far part then is 0: nobody looks whether they do, which would make the host wait.
    """
    form, weights, gate, positions, far, tail, _, log_decay, _ = inputs
    assert far is not None
    assert tail is not None
    feature_map = named(form.feature_map)
    rotary: Any = form.near_rotary
    reach = form.block_size * form.blocks
    table = None if rotary is None else rotary.rotary.table(-reach, reach + KEYS, q.device)
    out, *left = _step(
        *(q, k, v, gate),
        token_positions(positions, 1, q.device).expand(len(q), 1),
        *(*far, *tail),
        dense(weights.projection, q.shape[-1]),
        *(weights.pool_keys, weights.pool_values, weights.far_mass, weights.far_weight),
        *(table, log_decay),
        *(feature_map.name, feature_map.components, form.near, form.blocks),
    )
    return out, KernelState(*left[:2]), Tail(*left[2:])


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
    phi = phi_of(FeatureMap(feature_map, components), width, rows, log_decay is not None)
    of_layer = Near(near == "softmax", gate is not None, table is not None, blocks, block_size, width)
    left = _outputs(q, k, v, gate, positions, sums, log_scale, tail_keys, tail_values)
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
        Shares(None if gate is None else of_key_heads(gate), far_weight),
        positions,
        sums.contiguous(),
        log_scale.contiguous(),
        None if log_decay is None else log_decay.contiguous(),
        *left,
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
        NEAR=of_layer,
        PHI=phi,
    )
    return left


@_step.register_fake
def _outputs(q, k, v, gate, positions, sums, log_scale, tail_keys, tail_values, *others: Any):
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    states = (sums, log_scale, tail_keys, tail_values)
    return out, *(x.new_empty(x.shape) for x in states)
