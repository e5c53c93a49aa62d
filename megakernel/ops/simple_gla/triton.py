"""Simple gated linear attention on kernel attention's Triton kernels, with a decaying state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.kernel_attention.triton import (
    WIDEST,
    WIDEST_FLOAT32,
    KernelKeyTensors,
    KernelQueryTensors,
    KernelStatic,
    document_starts,
    kernel_operator,
    unsupported_features,
    unsupported_tiles,
)
from megakernel.ops.simple_gla import chunked, scaled_values, unscaled_state
from megakernel.ops.state import Exchange

MAP = "identity"

SMALLEST = 1e-30
"""Added to factors of values: the kernels leave out keys of weight 0, which would then have no gradient."""


def unsupported(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    max_width = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    return unsupported_features(q, MAP) or unsupported_tiles(q, v, None, max_width, WIDEST)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    value_scale: Tensor | None,
    positions: Positions,
    state: Tensor | None,
    exchange: Exchange | None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as the other implementations, in bfloat16 or float32.

    Factors of values are the kernels' weights of keys, which stay in float32. A decoding step runs in PyTorch.
    """
    if q.shape[2] == 1 and exchange is None and state is not None:
        return chunked(q, k, scaled_values(v, value_scale), log_decay, positions, state)
    starts, start = document_starts(positions, k.shape[2])
    # The kernels expect a column of normalizers after the values; it is unused here.
    first = None if state is None else unscaled_state(F.pad(state, (0, 1)))
    static = KernelStatic(MAP, components=1, causal=True, normalize=False, start=start)
    weights = None if value_scale is None else value_scale + SMALLEST
    keys = KernelKeyTensors(k, v.to(k.dtype), key_weights=weights, log_decay=log_decay, starts=starts)
    outputs, _, last = kernel_operator(static, KernelQueryTensors(q), keys, positions, first, exchange)
    assert last is not None
    return outputs.out, last.sums[..., :-1] * last.log_scale.exp()[..., None, None]
