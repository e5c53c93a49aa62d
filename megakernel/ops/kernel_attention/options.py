"""Arguments of a kernel attention backend other than queries, keys and values."""

from typing import NamedTuple

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.feature_maps import Map
from megakernel.ops.projections import Projection
from megakernel.ops.state import Exchange, KernelState


class KernelOptions(NamedTuple):
    """Validated arguments of `kernel_attention`, with `positions` instead of cu_seqlens."""

    feature_map: Map | str
    projection: Projection | None = None
    causal: bool = True
    normalize: bool = True
    key_weights: Tensor | None = None
    """(B, H_kv, N)"""

    priors: Tensor | None = None
    positions: Positions = 0
    initial_state: KernelState | None = None
    exchange: Exchange | None = None
    exchange_after: Exchange | None = None
    return_state: bool = True
    """Whether the caller needs the final state."""

    cross: bool = False
    """Whether keys are other tokens than queries, so that a key of weight 0 does not mark a query as padding."""
