"""The features by transforms over whole tensors, on any device."""

from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.feature_maps import FEATURE_MAPS, Features
from megakernel.ops.projections import FastFood


def attend(x: Tensor, projection: FastFood, *, feature_map: str) -> Features:
    """phi of x (B, H_kv, C, L, d) in float32 or better, as `megakernel.ops.feature_maps` has it."""
    return FEATURE_MAPS[feature_map].phi(x.to(accum_dtype(x.dtype)), projection)
