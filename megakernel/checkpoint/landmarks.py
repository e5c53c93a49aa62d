"""E and F for another number of landmarks."""

import torch
from torch import Tensor

from megakernel.attention.compression import OWN_SHARE, own_stretch
from megakernel.config import UserError


def fewer_landmarks(logits: Tensor, rank: int) -> Tensor:
    """Logits (..., r', b) whose landmarks stand for equal groups of those of `logits` (..., r, b), rows softmaxed.

    A landmark's weights are the mean of its group's. It counts b / r' tokens, as many as its group, so where the keys
    of a block are alike nothing changes. Where a group looked at its own stretch of the block alone, as landmarks
    that are tokens do, a tenth of the weight moves to the rest of the block: without it no gradient would.

    Raises UserError where r' does not divide r.
    """
    there, size = logits.shape[-2:]
    check_merge(there, rank)
    if rank == there:
        return logits
    weights = logits.double().softmax(-1).unflatten(-2, (rank, -1)).mean(-2)
    own = own_stretch(rank, size).to(weights.device)
    outside = weights.masked_fill(own, 0.0)
    share = outside.sum(-1, keepdim=True)
    least = 1 - OWN_SHARE
    raised = weights.masked_fill(~own, 0.0) * (OWN_SHARE / (1 - share)) + outside * (least / share)
    # With one landmark nothing lies outside its stretch.
    return torch.where((share < least) & (rank > 1), raised, weights).log().to(logits.dtype)


def check_merge(there: int, rank: int) -> None:
    """Raise UserError unless the landmarks that a block has make equal groups for `rank` of them."""
    if there % rank:
        divisors = ", ".join(str(n) for n in range(1, there + 1) if there % n == 0)
        raise UserError(
            f"compression.rank={rank} does not divide {there}, the landmarks or tokens of a block that are merged "
            f"into so many; take one of {divisors}"
        )


def rank_steps(block_size: int, rank: int) -> list[int]:
    """Landmarks of a block from one for each token down to `rank`, each number dividing the one before: b, ..., r.

    As many steps as there are, so that each loses as little as it can. Raises UserError where r does not divide b.
    """
    check_merge(block_size, rank)
    steps = [block_size]
    while steps[-1] > rank:
        left = steps[-1] // rank
        steps.append(steps[-1] // next(n for n in range(2, left + 1) if left % n == 0))
    return steps
