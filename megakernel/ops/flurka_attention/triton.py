"""Causal FLuRKA by Triton kernels: four launches forward, six or seven backward.

Forward pools blocks into landmarks, sums up each segment's, passes the sums on to the states that enter the segments
(small), and joins window and landmarks. Backward gives the gradients of queries through both, sums queries into states
from the right, hands those to the landmarks, and through them and the windows to keys, values, E and F. An exchange
adds a small launch to each, for the state that is handed on. Between the two nothing is kept but the inputs, the
output, two or three numbers per token, the landmarks, and one state per segment.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megakernel.ops.documents import carried, sees_far, token_positions
from megakernel.ops.feature_maps import named
from megakernel.ops.flurka_attention import chunked, decode, operators
from megakernel.ops.flurka_attention.form import FlurkaInputs, Form
from megakernel.ops.flurka_attention.places import places_of
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import exchanged
from megakernel.ops.kernel_attention.launches import state_of, tiles_of
from megakernel.ops.kernel_attention.triton import unsupported_features, unsupported_tiles
from megakernel.ops.kernels.features import phi_of
from megakernel.ops.partial_output import Found, in_range, may_lose
from megakernel.ops.projections import dense
from megakernel.ops.state import KernelState
from megakernel.ops.window import Tail, empty_tail

WIDEST = 128
"""d, M and b up to which a program's tiles fit into registers."""

WIDEST_FLOAT32 = 16
"""The same in float32, whose products take three registers for a number. For a map in two halves `read` leaves up to
456 bytes of a thread in local memory at 32, and 24 at 16. Wider heads run chunked."""

HIGHEST_RANK = 64
"""r likewise."""

ANGLES = 256
"""Places beside a window for which there are angles: a tile of queries and one of keys."""

SIGNED = ("identity", "rks")
"""Maps whose sums may be negative."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs) -> str | None:
    """Why the kernels cannot take these arguments of `attend`; None where they can."""
    form, weights = inputs.form, inputs.weights
    if (reason := unsupported_features(q, form.feature_map)) is not None:
        return reason
    if inputs.log_decay is not None and form.near == "kernel":
        return "log_decay is given, and near is kernel; expected near='softmax'"
    if weights.priors is not None:
        return "priors are given, for several keys at a position; expected one"
    if form.far_rotary is not None:
        return "far_rope='centroid' rotates landmarks; expected far_rope='none'"
    if form.near_rotary is not None and angles_of(form, q.shape[-1]) is None:
        return "rotary is no `attention.Rotary` of whole heads; expected one"
    name = named(form.feature_map).name
    if name in SIGNED and form.near == "softmax" and inputs.gate is None:
        return f"feature_map {name} has no sign to share a softmax's normalizer; expected a gate"
    if decode.unsupported(q, k, v, inputs) is None:
        return None
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if (reason := unsupported_tiles(q, v, weights.projection, most, most)) is not None:
        return reason
    if form.block_size > WIDEST:
        return f"blocks have {form.block_size} tokens; expected at most {WIDEST}"
    if weights.pool_keys.shape[-2] > HIGHEST_RANK:
        return f"blocks have {weights.pool_keys.shape[-2]} landmarks; expected at most {HIGHEST_RANK}"
    return None


def angles_of(form: Form, width: int) -> Any:
    """The `table` of the layer's rotation of heads of `width`; None where it has none or turns a part of them."""
    rotary = getattr(form.rotary, "rotary", None)
    return getattr(rotary, "table", None) if getattr(rotary, "head_dim", None) == width else None


def attend(
    q: Tensor, k: Tensor, v: Tensor, inputs: FlurkaInputs
) -> tuple[Tensor, KernelState | None, Tail | None]:
    """Arguments and results of `chunked.attend`, in bfloat16 or float32; no state where `inputs` want none.

    Of exponential maps queries can get lost, which are then made again: see `kernel_attention.triton.attend`.
    """
    if decode.unsupported(q, k, v, inputs) is None:
        return decode.step(q, k, v, inputs)
    form, weights, gate, positions, far, tail, exchange, log_decay, wants_state = inputs
    b, reach = form.block_size, form.block_size * form.blocks
    left = (empty_tail(k, v, reach) if tail is None else tail).after(k, v) if wants_state else None
    places = places_of(positions, q, block_size=b, blocks=form.blocks, tail=tail is not None)
    keys, values = k, v
    if tail is not None and places.before:
        keys, values = torch.cat([tail.keys, k], 2), torch.cat([tail.values, v], 2)
    matrix = dense(weights.projection, q.shape[-1])
    rows = None if matrix is None else matrix.shape[-2]
    phi = phi_of(form.feature_map, q.shape[-1], rows, log_decay is not None)
    name = named(form.feature_map)
    options = (name.name, name.components, form.near, form.blocks, places.start, places.before, places.oldest)
    pools = (weights.pool_keys.to(torch.float32), weights.pool_values.to(torch.float32))

    def merging() -> Tensors:
        """Logits of the gate, gamma, and the angles of windows."""
        far_weight = weights.far_weight if gate is None else None
        turns = None if form.near_rotary is None else angles_of(form, q.shape[-1])
        return gate, far_weight, None if turns is None else turns(0, reach + ANGLES, q.device)

    of_keys = (keys, values, matrix, *pools, weights.far_mass, log_decay)
    tables = (places.starts, places.windows, places.ends)
    first = None if tail is None else far
    last = None
    if exchange is None:
        tile = (None, None, None) if first is None else tiles_of(first, phi, v.shape[-1])
        out, factor, *_, sums, norms, logs = operators.forward(
            (q, *merging(), *of_keys, *tables, *tile), *options
        )
        if wants_state:
            last = state_of(sums, norms, logs, phi, v.shape[-1])
    else:
        carries = carried(positions, q, log_decay)
        shard = exchanged.Shard(q, partial(operators.FlurkaLaunches.of, options))
        (out, factor, *_), first, last = exchanged.attend(
            shard, (*of_keys, *tables), lambda: (q, *merging()), exchange, carries, phi, v.shape[-1]
        )
    # A window's softmax that shares its normalizer with the landmarks has weights that add up to 1 at least.
    if not may_lose(name, form.near == "kernel" or gate is not None):
        return out, last, left
    lost = factor == 0
    if gate is not None:
        lost &= sees_far(token_positions(positions, q.shape[2], q.device), b, form.blocks)[:, None]

    def again() -> Found:
        # What other processes handed over is in `first`.
        exact = inputs._replace(far=first or far, exchange=None)
        in_float64, *_ = chunked.attend(q.double(), k.double(), v.double(), exact)
        return (in_float64,), last

    return *in_range(((out, lost), last), again), left
