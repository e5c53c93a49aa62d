"""Features of a position at which several keys stand."""

from collections.abc import Callable

import torch
from torch import Tensor

from megakernel.ops.feature_maps import Features
from megakernel.ops.state import EMPTY


def mixed_features(phi: Callable[[Tensor], Features], keys: Tensor, priors: Tensor) -> Features:
    """sum_r pi_r phi(k_r) (Transformer-MGK, section 2.4): linear in phi, so that the state is that of one key.

    keys: (B, H_kv, C, L, M d), the keys of a position beside each other; priors: (H_kv, M) >= 0.
    """
    weights = priors.to(keys.dtype)
    parts = [phi(part) for part in keys.chunk(weights.shape[-1], -1)]
    values = torch.stack([part.values for part in parts])
    shares = weights.T[:, None, :, None, None]
    scales = [part.log_scale for part in parts if part.log_scale is not None]
    if not scales:
        return Features((shares[..., None] * values).sum(0), None)
    # A key of no weight must not set the scale of the others.
    logs = torch.stack(scales).masked_fill(shares == 0, EMPTY)
    largest = logs.amax(0)
    return Features(((shares * torch.exp(logs - largest))[..., None] * values).sum(0), largest)
