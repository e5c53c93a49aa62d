"""Kernel attention by Triton kernels: two launches and a small one forward, three or four and a small one backward.

Forward sums each segment's keys, passes the sums on to the states that enter the segments (small), and reads. Backward
gives the gradients of queries, sums theirs of each segment, passes the sums on from the right, and gives the gradients
of keys and values. An exchange adds a small launch to each, for the state that is handed on. Kept between the two are
the inputs, the output, two numbers per token, one state per segment, and the features of keys where these come from a
projection.
"""

from functools import partial

import torch
from torch import Tensor

from megakernel.ops.arguments import check_state
from megakernel.ops.documents import Positions, carried, made_once
from megakernel.ops.feature_maps import FeatureMap, named
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import chunked, decode, exchanged, operators
from megakernel.ops.kernel_attention.launches import state_of, tiles_of
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.kernels.features import SUPPORTED, phi_of
from megakernel.ops.kernels.launch import capability_of
from megakernel.ops.partial_output import Found, in_range, may_lose
from megakernel.ops.projections import Projection, dense, rows_of
from megakernel.ops.state import KernelState

WIDEST = 128
"""d and M up to which a program's tiles fit into registers."""

WIDEST_FLOAT32 = 64
"""d and M in float32, whose products take three registers for a number: wider ones would go to local memory."""

OLDEST = 80
"""Compute capability of the oldest GPUs: on those before, tiles go to local memory by kilobytes."""


def unsupported_features(q: Tensor, feature_map: FeatureMap | str) -> str | None:
    """Why no kernel takes the features of these queries."""
    form = named(feature_map)
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"q is {q.dtype}; expected bfloat16, float16 or float32"
    if form.name not in SUPPORTED or form.smoothing:
        given = f"{form.name} with smoothing" if form.smoothing else form.name
        return f"feature_map is {given}; expected {', '.join(SUPPORTED)} without smoothing"
    return None


def unsupported_tiles(
    q: Tensor,
    v: Tensor,
    projection: Projection | None,
    most: int,
    most_values: int,
) -> str | None:
    """Why kernels that multiply tiles do not: the GPU, float16, or more numbers in a token than `most`."""
    if (capability := capability_of(q.device)) < OLDEST:
        return f"the GPU has compute capability {capability / 10}; expected at least {OLDEST / 10}"
    if q.dtype == torch.float16:
        # Sums over many keys are above its largest number, and weights of exponential maps below its smallest.
        return "q is torch.float16, in which factors of products have no room; expected bfloat16 or float32"
    width = q.shape[-1]
    sizes = {
        "q": (width, most),
        "v": (v.shape[-1], most_values),
        "projection": (rows_of(projection, width), most),
    }
    for name, (size, limit) in sizes.items():
        if size > limit:
            return f"{name} has width {size} in {q.dtype}; expected at most {limit}"
    return None


def unsupported(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> str | None:
    """Why the kernels cannot take these arguments of `attend`; None where they can."""
    if (reason := unsupported_features(q, options.feature_map)) is not None:
        return reason
    if decode.unsupported(q, k, v, options) is None:
        return None
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if (reason := unsupported_tiles(q, v, options.projection, most, WIDEST)) is not None:
        return reason
    if not options.causal and isinstance(options.positions, Tensor):
        return "positions cut sequences into documents that see both ways; expected whole sequences"
    if options.exchange_after is not None:
        return "exchange_after is given; expected tokens that see no later ones"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState | None]:
    """Arguments and results of `chunked.attend`, in bfloat16 or float32; one token at a time in float16 too.

    There is no state where `options` want none.

    Quotients of exponential maps can get lost: those queries are made again by the chunked op in float64. To find out
    makes the host wait for the GPU, once a call. A compiled or captured graph cannot look; there, lost queries are 0.
    """
    if decode.unsupported(q, k, v, options) is None:
        return decode.step(q, k, v, options)
    (
        feature_map,
        projection,
        causal,
        normalize,
        key_weights,
        priors,
        positions,
        first,
        exchange,
        _,
        wants_state,
    ) = options
    width, value_dim = q.shape[-1], v.shape[-1]
    matrix = dense(projection, width)
    phi = phi_of(feature_map, width, None if matrix is None else matrix.shape[-2])
    starts, start = document_starts(positions, k.shape[2])
    form = named(feature_map)
    layer = (form.name, form.components, causal, normalize, start)
    keys = (k, v, matrix, key_weights, priors, None, starts)
    if exchange is None:
        tile: Tensors = (None, None, None)
        if first is not None:
            check_state(first, k, v)
            tile = tiles_of(first, phi, value_dim)
        out, reciprocal, *_, sums, norms, logs = operators.attend((q, *keys, *tile), *layer)
        last = state_of(sums, norms, logs, phi, value_dim) if wants_state else None
    else:
        carries = carried(positions, q)
        shard = exchanged.Shard(q, partial(operators.KernelLaunches.of, layer))
        (out, reciprocal), first, last = exchanged.attend(
            shard, keys, lambda: (q,), exchange, carries, phi, value_dim
        )
    if not may_lose(form, normalize):
        return out, last
    lost = reciprocal == 0
    if key_weights is not None:
        # A token that is no key itself is padding, and its output 0; so is that of a query that sees no key.
        seen = (
            key_weights != 0
            if key_weights.shape[2] == q.shape[2]
            else (key_weights != 0).any(-1, keepdim=True)
        )
        lost &= seen.repeat_interleave(q.shape[1] // k.shape[1], 1)

    def again() -> Found:
        # The keys of a state that other processes hand over are in it.
        exact = options._replace(projection=matrix, initial_state=first, exchange=None)
        in_float64, _ = chunked.attend(q.double(), k.double(), v.double(), exact)
        return (in_float64,), last

    return in_range(((out, lost), last), again)


def document_starts(positions: Positions, length: int) -> tuple[Tensor | None, int]:
    """The place where each token's document starts, (B, N) int32, or of all tokens: negative before the sequence."""
    if isinstance(positions, int):
        return None, -1 if positions > 0 else 0

    def of_documents(positions: Tensor) -> Tensor:
        places = torch.arange(length, device=positions.device)
        return (places - positions).clamp(min=-1).to(torch.int32)

    return made_once(positions, document_starts, of_documents), 0
