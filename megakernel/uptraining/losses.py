"""How far a student's attention is from its teacher's."""

import torch
from torch import Tensor

from megakernel.attention import WHOLE, ContextParallelShard
from megakernel.ops.dispatch import accum_dtype

FLOOR = 1e-8
"""Of weights in a cross entropy, so that one that vanishes has a finite gradient."""


def normalized_errors(output: Tensor, target: Tensor, cp_shard: ContextParallelShard = WHOLE) -> Tensor:
    """|y' - y|^2 / |y|^2 of each row and head, (B, H), of outputs y' and targets y (B, H, n, D), 0 at padding.

    Of a shard of the rows it is the shard's part: those of all shards add up. Float32 or better.
    """
    dtype = accum_dtype(target.dtype)
    output, target = output.to(dtype), target.to(dtype)
    energy = cp_shard.total(target.square().sum((2, 3)))
    return (output - target).square().sum((2, 3)) / energy.clamp(min=torch.finfo(dtype).tiny)


def cross_entropy(teacher: Tensor, student: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """-sum_j p_ij log w_ij of weights p and w (B, H, R, N), mean over the queries (B, R) that are `real`.

    Returns it, (B, H), and its derivatives by w, (B, H, R, N). Below FLOOR the logarithm goes on as a line.
    """
    count = real.sum(-1).clamp(min=1)[:, None]
    kept = student.clamp(min=FLOOR)
    log = kept.log() + (student - kept) / FLOOR
    return -(teacher * log).sum((2, 3)) / count, -teacher / kept / count[..., None, None]
