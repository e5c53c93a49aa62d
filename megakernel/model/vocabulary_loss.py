"""The loss of hidden states through a vocabulary, with its gradients, in chunks of tokens.

A chunk's logits exist once, and backward finds the gradients of the states and of the matrix ready: three products of a
head where keeping all logits takes three and the memory, and computing them again takes four.

Rows that pad the vocabulary take part in the products, whose sizes GPUs are fast with, and in nothing else: their
logits are -inf, so they get no probability and no gradient. A rank may have nothing but such rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megakernel.config import Model
from megakernel.ops.dispatch import accum_dtype

from .layer_inputs import IGNORED


@dataclass(frozen=True)
class LogitScaling:
    """Logits y = c tanh(x / (s c)) of products x of states and the head, or x / s without a cap."""

    divisor: float = 1.0
    """s"""

    cap: float | None = None
    """c"""

    @classmethod
    def of(cls, model: Model) -> "LogitScaling":
        """That of a model section."""
        return cls(model.logits_scaling, model.final_logit_softcapping)

    def __bool__(self) -> bool:
        return self.divisor != 1 or self.cap is not None

    def __call__(self, products: Tensor) -> Tensor:
        """y of x, in its dtype."""
        if self.divisor != 1:
            products = products / self.divisor
        return products if self.cap is None else (products / self.cap).tanh() * self.cap

    def slope(self, logits: Tensor) -> Tensor | float:
        """dy/dx at logits y."""
        return (1.0 if self.cap is None else 1 - (logits / self.cap).square()) / self.divisor


PLAIN = LogitScaling()
"""Logits are the products."""


@dataclass(eq=False)
class DistillationTarget:
    """What a teacher adds to the labels: T^2 KL(teacher || model) in nats at temperature T. It gets no gradient."""

    hidden: Tensor
    """(..., C'), its states before its head, of the model's tokens; of any width."""

    weight: Tensor
    """(R / tp, C'), its head, padded and cut as the model's."""

    temperature: float

    divergence: float
    """Weight of the divergence in the loss."""

    cross_entropy: float
    """Weight of the labels' cross entropy in the loss; 0: labels only say which tokens count."""

    scaling: LogitScaling = PLAIN
    """Of the teacher's logits."""

    parts: Tensor | None = None
    """Left by `head.mean_loss`: this shard's sums of cross entropy and KL(teacher || model), and their tokens."""


def summed_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    vocab_size: int,
    group: ProcessGroup | None = None,
    scaling: LogitScaling = PLAIN,
) -> Tensor:
    """The sum over tokens of the cross entropy in nats, in float32 or wider: ().

    Args:
        hidden: states (T, C) before the head.
        weight: (R / tp, C), this rank's rows of the head. Backward of `hidden` has the part that these rows give.
        targets: (T,) int64; IGNORED ones do not count.
        chunk_size: tokens whose logits may exist at once.
        vocab_size: how many of the rank's rows are of the vocabulary; the others, at the end, are padding.
        group: the ranks that share the vocabulary, in the order of its ids; None: this one has all.
        scaling: of the logits.
    """
    return summed_distillation(hidden, weight, targets, chunk_size, vocab_size, group, None, scaling)[0]


def summed_distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    vocab_size: int,
    group: ProcessGroup | None,
    distillation: DistillationTarget | None,
    scaling: LogitScaling = PLAIN,
) -> tuple[Tensor, Tensor]:
    """The same for a loss with distillation, and its parts (2,) without gradients.

    The parts are sums over tokens of the cross entropy and of KL(teacher || model), before they are weighed.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    sums: tuple[Tensor, Tensor] = _SummedLoss.apply(
        hidden, weight, targets, chunk_size, vocab_size, group, distillation, scaling, learns
    )
    return sums


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk_size: int,
        vocab_size: int,
        group: ProcessGroup | None,
        distillation: DistillationTarget | None,
        scaling: LogitScaling,
        learns: bool,
    ) -> tuple[Tensor, Tensor]:
        for_hidden, for_weight = (learns and needed for needed in ctx.needs_input_grad[:2])
        of_hidden = torch.empty_like(hidden) if for_hidden else None
        of_weight = None
        if for_weight:
            # In bfloat16 a chunk's term would be lost in the sum of those before.
            dtype = accum_dtype(weight.dtype) if len(hidden) > chunk_size else weight.dtype
            of_weight = torch.zeros_like(weight, dtype=dtype)
        parts = torch.zeros(2, dtype=accum_dtype(hidden.dtype), device=hidden.device)
        for first in range(0, len(hidden), chunk_size):
            part = slice(first, first + chunk_size)
            logits, scaled = _logits(hidden[part], weight, vocab_size, parts.dtype, scaling)
            if distillation is None:
                found, grad_logits = _cross_entropy(logits, targets[part], group)
            else:
                teacher_logits, _ = _logits(
                    distillation.hidden[part],
                    distillation.weight,
                    vocab_size,
                    parts.dtype,
                    distillation.scaling,
                )
                found, grad_logits = _distillation(
                    logits, teacher_logits, targets[part], vocab_size, group, distillation
                )
            parts += found
            if scaling:
                grad_logits.mul_(scaled)
            grad_logits = grad_logits.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(grad_logits, weight, out=of_hidden[part])
            if of_weight is None:
                continue
            if of_weight.dtype == grad_logits.dtype:
                of_weight.addmm_(grad_logits.T, hidden[part])
            else:
                of_weight += grad_logits.T @ hidden[part]
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight.to(weight.dtype))
        ctx.mark_non_differentiable(parts)
        if distillation is None:
            return parts[0].clone(), parts
        return distillation.cross_entropy * parts[
            0
        ] + distillation.divergence * distillation.temperature**2 * parts[1], parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if saved is None else saved * gradients[0] for saved in ctx.saved_tensors)
        return (*scaled, *[None] * 7)


def _logits(
    hidden: Tensor, weight: Tensor, vocab_size: int, dtype: torch.dtype, scaling: LogitScaling
) -> tuple[Tensor, Tensor | float]:
    """(T, R / tp), -inf at padding, and their slope by the products that they are made of."""
    logits = scaling(F.linear(hidden, weight).to(dtype))
    slope = scaling.slope(logits)
    logits[:, vocab_size:] = -math.inf
    return logits, slope


def _cross_entropy(logits: Tensor, targets: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The summed loss, with a place for a divergence (2,), and its gradient, written over the logits (T, R / tp)."""
    logits -= _highest([logits], group)[0]
    picked, place, here = _pick(logits, targets, group)
    weights = logits.exp_()
    total, picked = _summed([weights.sum(-1), picked], group)
    counts = targets != IGNORED
    grad_logits = weights.div_(total[:, None])
    grad_logits.scatter_add_(-1, place, -here.to(grad_logits.dtype))
    loss = ((total.log() - picked) * counts).sum()
    return torch.stack([loss, torch.zeros_like(loss)]), grad_logits.mul_(counts[:, None])


def _distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    vocab_size: int,
    group: ProcessGroup | None,
    distillation: DistillationTarget,
) -> tuple[Tensor, Tensor]:
    """Both sums (2,) and the gradient of the loss; both models' logits are written over."""
    temperature = distillation.temperature
    highest = _highest([logits, teacher_logits], group)
    logits -= highest[0]
    teacher_logits = teacher_logits.sub_(highest[1]).div_(temperature)
    picked, place, here = _pick(logits, targets, group)
    student_logits = logits / temperature
    teacher_weights = teacher_logits.exp()
    difference = teacher_logits.sub_(student_logits)
    difference[:, vocab_size:] = 0  # and not -inf + inf
    difference = difference.mul_(teacher_weights).sum(-1)
    student_weights = student_logits.exp_()
    weights = logits.exp_()
    sums = [part.sum(-1) for part in (weights, student_weights, teacher_weights)]
    total, student_total, teacher_total, difference, picked = _summed([*sums, difference, picked], group)
    divergence = difference / teacher_total + student_total.log() - teacher_total.log()
    grad_logits = weights.mul_((distillation.cross_entropy / total)[:, None])
    grad_logits.scatter_add_(-1, place, -distillation.cross_entropy * here.to(grad_logits.dtype))
    share = distillation.divergence * temperature
    grad_logits += student_weights.mul_((share / student_total)[:, None])
    grad_logits -= teacher_weights.mul_((share / teacher_total)[:, None])
    counts = targets != IGNORED
    losses = torch.stack([total.log() - picked, divergence])
    return (losses * counts).sum(-1), grad_logits.mul_(counts[:, None])


def _pick(logits: Tensor, targets: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (T,) of the targets among this rank's rows, else 0; their columns (T, 1), and whether they are here."""
    rows = logits.shape[-1]
    first = 0 if group is None else dist.get_rank(group) * rows
    place = targets[:, None] - first
    here = (place >= 0) & (place < rows)
    place = place.where(here, 0)
    return logits.gather(-1, place).where(here, 0)[:, 0], place, here


def _highest(logits: list[Tensor], group: ProcessGroup | None) -> Tensor:
    """The largest logit of every token, (len(logits), T, 1)."""
    highest = torch.stack([part.amax(-1, keepdim=True) for part in logits])
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return highest


def _summed(parts: list[Tensor], group: ProcessGroup | None) -> Tensor:
    """The parts (T,) of all ranks added up, (len(parts), T)."""
    sums = torch.stack(parts)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
