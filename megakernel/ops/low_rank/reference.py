"""E as the matrix it is, (L, N): what other backends are compared with."""

import torch
from torch import Tensor

from megakernel.ops.dispatch import accum_dtype


def compress(x: Tensor, pool: Tensor, first: int, length: int) -> Tensor:
    """Arguments and result of `chunked.compress`."""
    rank, size = pool.shape[-2:]
    count = -(-length // size)
    dtype = accum_dtype(x.dtype)
    whole = pool.new_zeros(*pool.shape[:-2], count * rank, count * size, dtype=dtype)
    for block in range(count):
        whole[..., block * rank : (block + 1) * rank, block * size : (block + 1) * size] = pool
    return torch.matmul(whole[..., first : first + x.shape[-2]], x.to(dtype))
