"""E x by one matrix product over blocks, without the zeros of E."""

import torch.nn.functional as F
from torch import Tensor


def compress(x: Tensor, pool: Tensor, first: int, length: int) -> Tensor:
    """(..., L, c) from tokens (..., n, c) at places first .. first + n - 1."""
    rank, size = pool.shape[-2:]
    before, inside = divmod(first, size)
    count = -(-(inside + x.shape[-2]) // size)
    if count == 1:
        # No padding to a whole block: the one block of Linformer can be far longer than the row.
        landmarks = pool[..., inside : inside + x.shape[-2]] @ x
    else:
        filled = F.pad(x, (0, 0, inside, count * size - inside - x.shape[-2])).unflatten(-2, (count, size))
        landmarks = (pool.unsqueeze(-3) @ filled).flatten(-3, -2)
    after = -(-length // size) - before - count
    return landmarks if before == after == 0 else F.pad(landmarks, (0, 0, before * rank, after * rank))
