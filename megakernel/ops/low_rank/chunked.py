"""E x by matrix products over blocks, without the zeros of E and without copies of x."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.ops.low_rank.product import product


def compress(x: Tensor, pool: Tensor, first: int, length: int) -> Tensor:
    """(..., L, c) from tokens (..., n, c) at places first .. first + n - 1."""
    rank, size = pool.shape[-2:]
    tokens = x.shape[-2]
    before, inside = divmod(first, size)
    # The end of a block that began in another shard, whole blocks, and the beginning of one that goes on in the next.
    lead = min(tokens, -first % size)
    whole, rest = divmod(tokens - lead, size)
    parts = []
    if lead:
        parts.append(product(pool[..., inside : inside + lead], x[..., :lead, :]))
    middle = x[..., lead : tokens - rest, :]
    if whole == 1:
        parts.append(product(pool, middle))
    elif whole:
        blocks = middle.unflatten(-2, (whole, size))
        parts.append(product(pool.unsqueeze(-3), blocks).flatten(-3, -2))
    if rest:
        parts.append(product(pool[..., :rest], x[..., tokens - rest :, :]))
    landmarks = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    after = -(-length // size) - before - landmarks.shape[-2] // rank
    return landmarks if before == after == 0 else F.pad(landmarks, (0, 0, before * rank, after * rank))
