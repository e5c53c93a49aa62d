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
    scaled = [weight[:, None, None] for weight in weights.unbind(-1)]
    if parts[0].log_scale is None:
        return Features(sum(w[..., None] * part.values for w, part in zip(scaled, parts)), None)
    logs = torch.stack([part.log_scale.masked_fill(w == 0, EMPTY) for w, part in zip(scaled, parts)])
    largest = logs.amax(0)
    shrunk = (w * torch.exp(log - largest) for w, log in zip(scaled, logs))
    return Features(sum(w[..., None] * part.values for w, part in zip(shrunk, parts)), largest)
