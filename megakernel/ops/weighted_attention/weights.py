"""The weight that a query gives a position with several keys (docs/formulas.md, 1, 5 and 6)."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megakernel.ops.state import EMPTY

Similarity = Literal["softmax", "gaussian"]
Join = Literal["sum", "max"]


class WeightOptions(NamedTuple):
    """The fixed options of a layer's weights."""

    similarity: Similarity
    """exp(q.k / sqrt(d)), or exp(-|q - k|^2 / 2 sigma_r^2)."""

    variances: tuple[float, ...]
    """sigma_r^2 of each key r in units of sqrt(d); all 1 under softmax."""

    join: Join
    """Whether a position's weight is the sum over its keys, or the largest."""

    normalize: bool
    """Whether a query's weights are divided by their sum."""


def component_logs(options: WeightOptions, q: Tensor, k: Tensor, key_weights: Tensor) -> Tensor:
    """log of weight times similarity of every query and key, (B, H_kv, R, M, L).

    q: (B, H_kv, R, d); k: (B, H_kv, M, L, d); key_weights: (B, H_kv, M, L) >= 0. `EMPTY` for keys of weight 0.
    """
    width = q.shape[-1]
    products = (q @ k.flatten(2, 3).transpose(-1, -2)).unflatten(-1, k.shape[2:4])
    precision = torch.tensor(options.variances, dtype=q.dtype, device=q.device).mul(width**0.5).reciprocal()
    if options.similarity == "gaussian":
        # |q - k|^2 / 2 from dot products: differences of all pairs would take d times the memory.
        products = products - k.square().sum(-1)[:, :, None] / 2 - q.square().sum(-1)[..., None, None] / 2
    logs = products * precision[:, None]
    exists = key_weights > 0
    log_weights = torch.where(exists, key_weights.clamp(min=torch.finfo(key_weights.dtype).tiny), 1.0).log()
    return (logs + log_weights[:, :, None]).masked_fill(~exists[:, :, None], EMPTY)


def position_logs(
    options: WeightOptions, q: Tensor, k: Tensor, key_weights: Tensor, visible: Tensor
) -> Tensor:
    """log weight of every position (B, H_kv, G, n, L), -inf if it is 0; tensors as in `component_logs`.

    visible: (B, n, L) bool, whether the query sees the position; the R = G n rows are n queries of G heads.
    """
    logs = component_logs(options, q, k, key_weights)
    joined = logs.logsumexp(-2) if options.join == "sum" else logs.amax(-2)
    mask = visible[:, None, None] & (key_weights > 0).any(2)[:, :, None, None]
    return joined.unflatten(2, (-1, visible.shape[1])).masked_fill(~mask, -torch.inf)
