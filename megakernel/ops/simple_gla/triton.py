"""Simple gated linear attention on kernel attention's Triton kernels, with a decaying state."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.documents import Positions, carry_factor
from megakernel.ops.groups import Tensors
from megakernel.ops.kernel_attention import exchanged, operators
from megakernel.ops.kernel_attention.launches import pack_state, unpack_state
from megakernel.ops.kernel_attention.triton import (
    WIDEST,
    WIDEST_FLOAT32,
    document_starts,
    unsupported_features,
    unsupported_tiles,
)
from megakernel.ops.kernels.features import phi_of
from megakernel.ops.simple_gla import chunked, unscaled_state
from megakernel.ops.state import Exchange

MAP = "identity"


def unsupported(q: Tensor, k: Tensor, v: Tensor, *_: object) -> str | None:
    """Why the kernels do not support these arguments of `attend`; None if they do."""
    max_width = WIDEST_FLOAT32 if q.dtype == torch.float32 else WIDEST
    return unsupported_features(q, MAP) or unsupported_tiles(q, v, None, max_width, WIDEST)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    positions: Positions,
    state: Tensor | None,
    exchange: Exchange | None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as the other implementations, in bfloat16 or float32.

    A decoding step runs in PyTorch.
    """
    if q.shape[2] == 1 and exchange is None and state is not None:
        return chunked(q, k, v, log_decay, positions, state)
    width, value_dim = q.shape[-1], v.shape[-1]
    phi = phi_of(MAP, width, None, decays=True)
    starts, start = document_starts(positions, k.shape[2])
    options = (MAP, 1, True, False, start)
    keys = (k, v, None, None, None, log_decay, starts)
    if exchange is None:
        packed: Tensors = (None, None, None)
        if state is not None:
            # The kernels expect a column of normalizers after the values; it is unused here.
            packed = pack_state(unscaled_state(F.pad(state, (0, 1))), phi, value_dim)
        out, _, *_, sums, norms, logs = operators.attend((q, *keys, *packed), *options)
        last = unpack_state(sums, norms, logs, phi, value_dim)
    else:
        shard = exchanged.Shard(q, partial(operators.KernelLaunches.of, options))
        factor = carry_factor(positions, q, log_decay)
        (out, *_), _, last = exchanged.attend(shard, keys, lambda: (q,), exchange, factor, phi, value_dim)
    return out, last.sums[..., :-1] * last.log_scale.exp()[..., None, None]
