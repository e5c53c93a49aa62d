"""The distance between two models' predictions, in chunks of tokens so that their logits never exist whole."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from .head import for_vocabulary
from .settings import ModelSettings
from .stream import IGNORED


def mean_divergence(
    matrices: tuple[Tensor, Tensor],
    hidden: tuple[Tensor, Tensor],
    labels: Tensor,
    num_targets: Tensor,
    temperature: float,
    settings: ModelSettings,
) -> Tensor:
    """T^2 KL(teacher || model) in nats at temperature T: this piece's sum over its targets, divided by their number.

    matrices: (V / tp, C) of the model and of its teacher, whose widths may differ; hidden: their states (N, B, C)
    before the head; labels (B, N), whose IGNORED tokens do not count. The teacher gets no gradient.
    """
    ours, theirs = (for_vocabulary(states, settings).flatten(0, 1) for states in hidden)
    counts = labels.transpose(0, 1).reshape(-1) != IGNORED
    ours, theirs = ours[counts], theirs[counts].detach()
    rows = settings.loss_chunk_size
    group = settings.mesh.tp.group
    # Of several chunks, the logits are made again in backward: one chunk's exist at a time.
    divergence = partial(checkpoint, _divergence, use_reentrant=False) if len(ours) > rows else _divergence
    total = torch.zeros((), device=ours.device)
    for chunk in zip(ours.split(rows), theirs.split(rows)):
        total = total + divergence(matrices, chunk, temperature, group)
    return total / num_targets.squeeze()


def _divergence(
    matrices: tuple[Tensor, Tensor], hidden: tuple[Tensor, Tensor], temperature: float, group: ProcessGroup
) -> Tensor:
    logits, target = (F.linear(x, matrix).float() / temperature for x, matrix in zip(hidden, matrices))
    summed: Tensor = _Divergence.apply(logits, target.detach(), group)
    return temperature**2 * summed


class _Divergence(torch.autograd.Function):
    """sum over tokens of KL(softmax(target) || softmax(logits)) of vocabularies (T, V / tp) shared by a group."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup) -> Tensor:
        ours, theirs = _log_softmax(logits, group), _log_softmax(target, group)
        weights = theirs.exp()
        ctx.save_for_backward(ours.exp() - weights)
        divergence = (weights * (theirs - ours)).sum()
        dist.all_reduce(divergence, group=group)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (pull,) = ctx.saved_tensors
        return grads[0] * pull, None, None


def _log_softmax(logits: Tensor, group: ProcessGroup) -> Tensor:
    highest = logits.max(-1, keepdim=True).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    total = (logits - highest).exp().sum(-1, keepdim=True)
    dist.all_reduce(total, group=group)
    return logits - highest - total.log()
