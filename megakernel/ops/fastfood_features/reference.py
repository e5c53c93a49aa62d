"""The features by the dense matrix of the transform. What the other backends are compared with."""

from torch import Tensor

from megakernel.ops.dispatch import accum_dtype
from megakernel.ops.feature_maps import FEATURE_MAPS, Features
from megakernel.ops.projections import FastFood, dense


def attend(x: Tensor, projection: FastFood, *, feature_map: str) -> Features:
    """Arguments and results of `chunked.attend`."""
    matrix = dense(projection, x.shape[-1])
    return FEATURE_MAPS[feature_map].phi(x.to(accum_dtype(x.dtype)), matrix)
