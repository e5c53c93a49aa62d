"""What implementations of kernel attention are given beside queries, keys and values."""

from typing import NamedTuple

from torch import Tensor

from megakernel.ops.documents import Positions
from megakernel.ops.feature_maps import FeatureMap
from megakernel.ops.projections import Projection
from megakernel.ops.state import Exchange, KernelState


class KernelOptions(NamedTuple):
    """Arguments of `kernel_attention` of these names, checked, with `positions` in place of cu_seqlens."""

    feature_map: FeatureMap | str
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
    wants_state: bool = True
    """Whether anybody reads what is left behind."""
