"""Simple gated linear attention by the Triton kernels of kernel attention, whose state here decays."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import Positions, carried
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import exchanged, operators
from megakernel.ops.kernel_attention.launches import state_of, tiles_of
from megakernel.ops.kernel_attention.triton import (
    WIDEST,
    WIDEST_FLOAT32,
    document_starts,
    unsupported_features,
    unsupported_tiles,
)
from megakernel.ops.kernels.features import phi_of
from megakernel.ops.simple_gla import chunked, of_sums
from megakernel.ops.state import Exchange

MAP = "identity"


def unsupported(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    """Why the kernels cannot take these arguments of `attend`; None where they can."""
    most = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    return unsupported_features(q, MAP) or unsupported_tiles(q, v, None, most, WIDEST)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    positions: Positions,
    state: Tensor | None,
    exchange: Exchange | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of the other implementations, in bfloat16 or float32.

    One token of decoding is a product of its state: torch computes it.
    """
    if q.shape[2] == 1 and exchange is None and state is not None:
        return chunked(q, k, v, log_decay, positions, state)
    width, value_dim = q.shape[-1], v.shape[-1]
    phi = phi_of(MAP, width, None, decays=True)
    starts, start = document_starts(positions, k.shape[2])
    layer = (MAP, 1, True, False, start)
    keys = (k, v, None, None, None, log_decay, starts)
    if exchange is None:
        # Kernels know a column of normalizers behind the values; here nobody reads it.
        tile: Tensors = (None, None, None)
        if state is not None:
            tile = tiles_of(of_sums(F.pad(state, (0, 1))), phi, value_dim)
        out, _, *_, sums, norms, logs = operators.attend((q, *keys, *tile), *layer)
        left = state_of(sums, norms, logs, phi, value_dim)
    else:
        shard = exchanged.Shard(q, partial(operators.KernelLaunches.of, layer))
        factor = carried(positions, q, log_decay)
        (out, *_), _, left = exchanged.attend(shard, keys, lambda: (q,), exchange, factor, phi, value_dim)
    return out, left.sums[..., :-1] * left.log_scale.exp()[..., None, None]
