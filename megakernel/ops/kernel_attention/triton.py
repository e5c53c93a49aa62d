"""Kernel attention in Triton: two large launches and a small one forward, three or four and a small one backward.

Forward sums the keys of each segment, scans these sums into the states that enter the segments (the small launch), and
computes outputs. Backward computes dQ, sums queries per segment, scans these sums from right to left, and computes dK
and dV. An exchange adds a small launch to each pass, for the state that is sent. Saved for backward are the inputs, the
output, two numbers per token, one state per segment, and the features of keys if the map has a projection.
"""

import torch
from torch import Tensor

from megakernel.ops.documents import Positions, cached_for_positions
from megakernel.ops.feature_maps import Map, named
from megakernel.ops.kernel_attention import chunked, decode, operators
from megakernel.ops.kernel_attention.operators import KernelKeyTensors, KernelQueryTensors, KernelStatic
from megakernel.ops.kernel_attention.options import KernelOptions
from megakernel.ops.kernels.feature_maps import SUPPORTED
from megakernel.ops.kernels.launch import capability_of
from megakernel.ops.partial_output import kernels_check, recompute_lost
from megakernel.ops.projections import Projection, dense, rows_of
from megakernel.ops.state import KernelState

WIDEST = 128
"""Largest d and M; beyond that, a program's tiles do not fit into registers."""

WIDEST_FLOAT32 = 64
"""The same in float32, whose matrix products take three registers per element: wider tiles would spill."""

MIN_CAPABILITY = 80
"""Lowest supported compute capability; on older GPUs, tiles spill kilobytes."""


def unsupported_features(q: Tensor, feature_map: Map | str) -> str | None:
    """Why the kernels do not support this dtype or feature map; None if they do."""
    feature_map = named(feature_map)
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"q is {q.dtype}; expected bfloat16, float16 or float32"
    if feature_map.name not in SUPPORTED or feature_map.smoothing:
        actual = f"{feature_map.name} with smoothing" if feature_map.smoothing else feature_map.name
        return f"feature_map is {actual}; expected {', '.join(SUPPORTED)} without smoothing"
    return None


def unsupported_tiles(
    q: Tensor, v: Tensor, projection: Projection | None, max_width: int, max_value_width: int
) -> str | None:
    """Why kernels with matrix products of tiles do not support the GPU, dtype or widths; None if they do."""
    if (capability := capability_of(q.device)) < MIN_CAPABILITY:
        return f"the GPU has compute capability {capability / 10}; expected at least {MIN_CAPABILITY / 10}"
    if q.dtype == torch.float16:
        # Sums over many keys overflow it, and weights of exponential maps underflow.
        return (
            "q is torch.float16, whose range is too small for sums and weights; expected bfloat16 or float32"
        )
    width = q.shape[-1]
    sizes = {
        "q": (width, max_width),
        "v": (v.shape[-1], max_value_width),
        "projection": (rows_of(projection, width), max_width),
    }
    for name, (size, limit) in sizes.items():
        if size > limit:
            return f"{name} has width {size} in {q.dtype}; expected at most {limit}"
    return None


def unsupported(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    if (reason := unsupported_features(q, options.feature_map)) is not None:
        return reason
    if decode.unsupported(q, k, v, options) is None:
        return None
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    if (reason := unsupported_tiles(q, v, options.projection, most, WIDEST)) is not None:
        return reason
    if not options.causal and isinstance(options.positions, Tensor):
        return "positions split sequences into documents, without causal; expected one document per sequence"
    if options.exchange_after is not None:
        return "exchange_after is given; expected causal attention"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: KernelOptions) -> tuple[Tensor, KernelState | None]:
    """Same arguments and results as `chunked.attend`, in bfloat16 or float32; single tokens in float16 too.

    The state is None if `options` do not ask for it.

    Quotients of exponential maps can get lost to underflow; such queries are recomputed by the chunked op in float64,
    or are 0: see `kernels_check`. Compiled or captured graphs cannot check, and there they are 0.
    """
    if decode.unsupported(q, k, v, options) is None:
        return decode.step(q, k, v, options)
    feature_map, projection, causal, normalize, key_weights, priors, positions, first, exchange, *_ = options
    matrix = dense(projection, q.shape[-1])
    starts, start = document_starts(positions, k.shape[2])
    feature_map = named(feature_map)
    outputs, first, last = operators.attend(
        KernelStatic(feature_map.name, feature_map.components, causal, normalize, start),
        KernelQueryTensors(q),
        KernelKeyTensors(k, v, matrix, key_weights=key_weights, priors=priors, starts=starts),
        positions,
        first,
        exchange,
        options.return_state,
    )
    if not kernels_check(feature_map, normalize, q):
        return outputs.out, last
    lost = outputs.reciprocal == 0
    if key_weights is not None:
        # Padding (key weight 0) and queries that see no key are not lost: their outputs stay 0.
        real = key_weights != 0
        if key_weights.shape[2] != q.shape[2]:
            real = real.any(-1, keepdim=True)
        lost &= real.repeat_interleave(q.shape[1] // k.shape[1], 1)

    def recompute() -> Tensor:
        # With an exchange, `first` is the state that came from the other ranks.
        exact = options._replace(projection=matrix, initial_state=first, exchange=None)
        return chunked.attend(q.double(), k.double(), v.double(), exact)[0]

    return recompute_lost((outputs.out, lost), recompute), last


def document_starts(positions: Positions, length: int) -> tuple[Tensor | None, int]:
    """Where each token's document starts, (B, N) int32, or one place for all; negative if before the sequence."""
    if isinstance(positions, int):
        return None, -1 if positions > 0 else 0

    def make_starts(positions: Tensor) -> Tensor:
        places = torch.arange(length, device=positions.device)
        return (places - positions).clamp(min=-1).to(torch.int32)

    return cached_for_positions(positions, document_starts, make_starts), 0
