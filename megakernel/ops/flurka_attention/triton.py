"""Causal FLuRKA in Triton: four launches forward, six or seven backward.

Forward pools blocks into landmarks, sums those of each segment, scans the sums into the states that enter the segments
(a small launch), and merges window and landmarks. Backward computes the gradients of queries through both, scans states
of queries from right to left, and computes the gradients of landmarks, and through them and the windows those of keys,
values, E and F. An exchange adds a small launch to each pass, for the state that is sent. Saved for backward are the
inputs, the output, its spread (see `merge_kernels`), two or three numbers per token, the landmarks, and one state per
segment.
"""

from typing import Any

import torch
from torch import Tensor

from megakernel.ops.documents import sees_far, token_positions
from megakernel.ops.feature_maps import named
from megakernel.ops.flurka_attention import chunked, decode, operators
from megakernel.ops.flurka_attention.block_tables import block_tables
from megakernel.ops.flurka_attention.options import FlurkaInputs, FlurkaOptions
from megakernel.ops.flurka_attention.tensors import FlurkaKeyTensors, FlurkaQueryTensors, FlurkaStatic
from megakernel.ops.kernel_attention.triton import unsupported_features, unsupported_tiles
from megakernel.ops.partial_output import kernels_check, recompute_lost
from megakernel.ops.projections import dense
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail, empty_tail

WIDEST = 128
"""Largest d, M and b; beyond that, a program's tiles do not fit into registers."""

WIDEST_FLOAT32 = 16
"""The same in float32, whose matrix products take three registers per element. For a map with two halves, `read` spills
up to 456 bytes per thread at 32, and 24 bytes at 16. Wider heads run chunked."""

HIGHEST_RANK = 64
"""Largest r, for the same reason."""

ANGLES = 256
"""Rows of the table of angles beyond the window: a tile of queries and one of keys."""

SIGNED = ("identity", "rks")
"""Feature maps whose sums of weights may be negative."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    options, weights = inputs.options, inputs.weights
    if (reason := unsupported_features(q, options.feature_map)) is not None:
        return reason
    if inputs.log_decay is not None and options.near == "kernel":
        return "log_decay is given, and near is kernel; expected near='softmax'"
    if weights.priors is not None:
        return "priors are given; expected one key per position"
    if options.far_rotary is not None:
        return "far_rope='centroid' rotates landmarks; expected far_rope='none'"
    if options.near_rotary is not None and angle_table(options, q.shape[-1]) is None:
        return "rotary is not an `attention.Rotary` of whole heads; expected one"
    name = named(options.feature_map).name
    if name in SIGNED and options.near == "softmax" and inputs.gate is None:
        return f"feature_map {name} gives negative weights, which cannot share a softmax's normalizer; expected a gate"
    if decode.unsupported(q, k, v, inputs) is None:
        return None
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if (reason := unsupported_tiles(q, v, weights.projection, most, most)) is not None:
        return reason
    if options.block_size > WIDEST:
        return f"blocks have {options.block_size} tokens; expected at most {WIDEST}"
    if weights.pool_keys.shape[-2] > HIGHEST_RANK:
        return f"blocks have {weights.pool_keys.shape[-2]} landmarks; expected at most {HIGHEST_RANK}"
    return None


def angle_table(options: FlurkaOptions, width: int) -> Any:
    """The `table` method of the layer's rotation; None if it has none or does not rotate whole heads of `width`."""
    rotary = getattr(options.rotary, "rotary", None)
    return getattr(rotary, "table", None) if getattr(rotary, "head_dim", None) == width else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs
) -> tuple[Tensor, KernelState | None, Tail | None]:
    """Same arguments and results as `chunked.attend`, in bfloat16 or float32; no state if `inputs` ask for none.

    With exponential maps, queries can be lost: see `kernel_attention.triton.attend`.
    """
    if decode.unsupported(q, k, v, inputs) is None:
        return decode.step(q, k, v, inputs)
    options, weights, gate, positions, far, tail, exchange, log_decay, return_state = inputs
    b, reach = options.block_size, options.block_size * options.blocks
    next_tail = (empty_tail(k, v, reach) if tail is None else tail).after(k, v) if return_state else None
    tables = block_tables(positions, q, block_size=b, blocks=options.blocks, tail=tail is not None)
    keys, values = k, v
    if tail is not None and tables.before:
        keys, values = torch.cat([tail.keys, k], 2), torch.cat([tail.values, v], 2)
    matrix = dense(weights.projection, q.shape[-1])
    feature_map = named(options.feature_map)
    make_table = None if options.near_rotary is None else angle_table(options, q.shape[-1])
    table = None if make_table is None else make_table(0, reach + ANGLES, q.device)
    outputs, first, last = operators.attend(
        FlurkaStatic(
            feature_map=feature_map.name,
            components=feature_map.components,
            near=options.near,
            blocks=options.blocks,
            start=tables.start,
            before=tables.before,
            oldest=tables.oldest,
            trains=torch.is_grad_enabled(),
        ),
        FlurkaQueryTensors(
            q, gate, weights.gate_weight, far_weight=weights.far_weight if gate is None else None, table=table
        ),
        FlurkaKeyTensors(
            keys,
            values,
            weights.pool_keys.to(torch.float32),
            weights.pool_values.to(torch.float32),
            projection=matrix,
            log_decay=log_decay,
            far_mass=weights.far_mass,
            starts=tables.starts,
            windows=tables.windows,
            ends=tables.ends,
        ),
        positions,
        None if tail is None else far,
        exchange,
        return_state,
    )
    # If a softmax window shares its normalizer with the landmarks, the weights add up to at least 1.
    may_lose = options.near == "kernel" or gate is not None
    if not kernels_check(feature_map, may_lose, q, log_decay is not None):
        return outputs.out, last, next_tail
    lost = outputs.factor == 0
    if gate is not None:
        lost &= sees_far(token_positions(positions, q.shape[2], q.device), b, options.blocks)[:, None]

    def recompute() -> Tensor:
        # With an exchange, `first` is the state that came from the other ranks.
        exact = inputs._replace(far=first or far, exchange=None)
        return chunked.attend(q.double(), k.double(), v.double(), exact)[0]

    return recompute_lost((outputs.out, lost), recompute), last, next_tail
