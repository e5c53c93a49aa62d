"""Cross entropy and distillation losses over a vocabulary, with gradients, in chunks of tokens.

Forward also computes the gradients while a chunk's logits exist. That takes three products with the head, as many as
keeping all logits and one fewer than recomputing them.

Padding rows of the vocabulary are part of the products, for sizes that are fast on GPUs, but their logits become -inf:
no probability, no gradient. A rank may have only padding rows.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megakernel.config import Model
from megakernel.ops.dispatch import Implementation, Kernels, choose
from megakernel.ops.layers import load_liger
from megakernel.ops.tensors import accum_dtype

from .layer_inputs import IGNORED


def perplexity(loss: float) -> float:
    """exp(loss), also of NaN; infinity above the largest float, as of a model that has diverged."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


@dataclass(frozen=True)
class LogitScaling:
    """Logits y = c tanh(x / (s c)), or x / s without a cap, of products x of hidden states and head."""

    divisor: float = 1.0
    """s"""

    cap: float | None = None
    """c"""

    @classmethod
    def of(cls, model: Model) -> "LogitScaling":
        """The scaling that a model section configures."""
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


NO_SCALING = LogitScaling()
"""No scaling."""


@dataclass(eq=False)
class DistillationTarget:
    """A teacher's hidden states and head, for T^2 KL(teacher || model) in nats at temperature T; without gradients."""

    hidden: Tensor
    """(..., C'), the teacher's inputs to its head for the model's tokens; of any width."""

    weight: Tensor
    """(R / tp, C'), the teacher's head, padded and partitioned as the model's."""

    temperature: float

    divergence: float
    """Weight of T^2 KL(teacher || model) in the loss."""

    cross_entropy: float
    """Weight of the labels' cross entropy in the loss; 0: labels only select the tokens that count."""

    scaling: LogitScaling = NO_SCALING
    """Scaling of the teacher's logits."""

    parts: Tensor | None = None
    """Set by `head.mean_loss`: this shard's sums of cross entropy and KL(teacher || model), and its counted tokens."""


@dataclass(eq=False)
class ZLoss:
    """The z-loss: coefficient x the mean of logsumexp(logits)^2 over the tokens that count.

    It has gradients, and is not part of the loss that is returned and logged.
    """

    coefficient: float

    share: Tensor | None = None
    """Set by `head.mean_loss`: this rank's share () of its value in the present training step."""


def summed_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    vocab_size: int,
    group: ProcessGroup | None = None,
    scaling: LogitScaling = NO_SCALING,
    distillation: DistillationTarget | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The sum of the loss over tokens in nats, () float32 or wider, and two sums (2,) without gradients.

    The loss is the cross entropy; with `distillation`, its weighted sum with KL(teacher || model). The two sums are the
    cross entropy and KL(teacher || model), else the cross entropy and the z-loss. The gradients are those of the loss
    plus the z-loss; the returned loss does not contain it.

    Args:
        hidden: states (T, C) before the head.
        weight: (R / tp, C), this rank's rows of the head. The gradient of `hidden` is the part from these rows.
        targets: (T,) int64; IGNORED ones do not count.
        chunk_size: tokens whose logits exist at once.
        vocab_size: this rank's rows that are not padding; padding comes last.
        group: ranks of the vocabulary-parallel head, in the order of ids; None: this rank has the whole head.
        scaling: scaling of the logits.
        distillation: the teacher's states and head, and the weights of both parts.
        z_loss: coefficient of the sum of logsumexp(logits)^2; 0 with `distillation`.
    """
    assert not (z_loss and distillation)
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    sums: tuple[Tensor, Tensor] = _SummedLoss.apply(
        hidden, weight, targets, chunk_size, vocab_size, group, distillation, scaling, needs_grad, z_loss
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
        needs_grad: bool,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight = (needs_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        if wants_weight:
            # In bfloat16 the sum over chunks would lose the terms of later ones.
            dtype = accum_dtype(weight.dtype) if len(hidden) > chunk_size else weight.dtype
            grad_weight = torch.zeros_like(weight, dtype=dtype)
        parts = torch.zeros(2, dtype=accum_dtype(hidden.dtype), device=hidden.device)
        # Without tensor parallelism, the fastest implementation for this device.
        cross_entropy: Implementation = partial(_cross_entropy, group=group, scaling=scaling)
        if group is None and not scaling:
            cross_entropy = choose(CROSS_ENTROPIES, None)
        for first in range(0, len(hidden), chunk_size):
            chunk = slice(first, first + chunk_size)
            inputs = (hidden[chunk], weight, targets[chunk], vocab_size)
            if distillation is None:
                sums, grad_logits = cross_entropy(*inputs, needs_grad, z_loss)
            else:
                teacher_hidden = distillation.hidden[chunk]
                sums, grad_logits = _distillation(*inputs, group, scaling, teacher_hidden, distillation)
            parts += sums
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[chunk])
            del grad_logits  # before the next chunk's logits take memory
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(parts)
        if distillation is None:
            return parts[0].clone(), parts
        divergence = distillation.divergence * distillation.temperature**2
        return distillation.cross_entropy * parts[0] + divergence * parts[1], parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # In place, as copies would be as large as the hidden states: so there can be only one backward pass.
        scaled = (None if saved is None else saved.mul_(gradients[0]) for saved in ctx.saved_tensors)
        return (*scaled, *[None] * 8)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, which may be less precise than the total."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and torch.cuda.get_device_capability(a.device)[0] >= 8:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _logits(
    hidden: Tensor, weight: Tensor, vocab_size: int, scaling: LogitScaling
) -> tuple[Tensor, Tensor | float]:
    """Logits (T, R / tp) in float32 or wider, -inf at padding, and their derivative by the unscaled products."""
    logits = scaling(F.linear(hidden, weight).to(accum_dtype(hidden.dtype)))
    slope = scaling.slope(logits)
    logits[:, vocab_size:] = -math.inf
    return logits, slope


def _multiplied(x: Tensor, factors: Tensor, slope: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x times factors (T, 1) and slope, in `dtype`; overwrites x."""
    if isinstance(slope, Tensor) or slope != 1:
        x *= slope
    return torch.mul(x, factors, out=x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))


def _cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    needs_grad: bool,
    z_loss: float,
    group: ProcessGroup | None = None,
    scaling: LogitScaling = NO_SCALING,
) -> tuple[Tensor, Tensor]:
    logits, slope = _logits(hidden, weight, vocab_size, scaling)
    largest = _max_logits([logits], group)[0]
    logits -= largest
    target_logits, columns, is_local = _target_logits(logits, targets, group)
    weights = logits.exp_()
    total, target_logits = _all_reduced([weights.sum(-1), target_logits], group)
    counts = targets != IGNORED
    loss = ((total.log() - target_logits) * counts).sum()
    squares = torch.zeros_like(loss)
    if z_loss:
        logsumexp = total.log() + largest[:, 0]
        squares = z_loss * (logsumexp.square() * counts).sum()
    sums = torch.stack([loss, squares])
    if not needs_grad:
        return sums, weights
    if z_loss:
        weights *= (1 + 2 * z_loss * logsumexp)[:, None]
    weights.scatter_add_(-1, columns, -total[:, None] * is_local)
    return sums, _multiplied(weights, (counts / total)[:, None], slope, hidden.dtype)


def _reference_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, needs_grad: bool, z_loss: float
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        logits = F.linear(hidden, weight).detach().requires_grad_()
        exact = logits[:, :vocab_size].to(accum_dtype(logits.dtype))
        loss = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="sum")
        squares = z_loss * exact.logsumexp(-1).square()[targets != IGNORED].sum()
        gradient = torch.autograd.grad(loss + squares, logits)[0]
    return torch.stack([loss, squares]).detach(), gradient


CROSS_ENTROPIES: dict[str, Implementation] = {
    "chunked": _cross_entropy,
    "reference": _reference_cross_entropy,
    "liger": Kernels("cross_entropy", load_liger, "cross_entropy"),
}
"""Backend -> the loss of a chunk.

It takes hidden states (T, C), the head (R, C), targets (T,), the number of its rows that are not padding, whether a
gradient is needed, and the coefficient of the z-loss. It returns the sums of cross entropy and z-loss, (2,) in float32
or wider, and the gradient of both by the logits (T, R) in the dtype of the states, 0 at padding.
"""


def _distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    group: ProcessGroup | None,
    scaling: LogitScaling,
    teacher_hidden: Tensor,
    distillation: DistillationTarget,
) -> tuple[Tensor, Tensor]:
    """(2,): summed cross entropy and KL; and the gradient of the loss by the logits, in the dtype of the states."""
    logits, slope = _logits(hidden, weight, vocab_size, scaling)
    teacher_logits, _ = _logits(teacher_hidden, distillation.weight, vocab_size, distillation.scaling)
    temperature = distillation.temperature
    largest = _max_logits([logits, teacher_logits], group)
    logits -= largest[0]
    teacher_logits = teacher_logits.sub_(largest[1]).div_(temperature)
    target_logits, columns, is_local = _target_logits(logits, targets, group)
    student_logits = logits / temperature
    teacher_weights = teacher_logits.exp()
    difference = teacher_logits.sub_(student_logits)
    difference[:, vocab_size:] = 0  # not the NaN of -inf + inf
    difference = difference.mul_(teacher_weights).sum(-1)
    student_weights = student_logits.exp_()
    weights = logits.exp_()
    sums = [part.sum(-1) for part in (weights, student_weights, teacher_weights)]
    total, student_total, teacher_total, difference, target_logits = _all_reduced(
        [*sums, difference, target_logits], group
    )
    divergence = difference / teacher_total + student_total.log() - teacher_total.log()
    grad_logits = weights.mul_((distillation.cross_entropy / total)[:, None])
    grad_logits.scatter_add_(-1, columns, -distillation.cross_entropy * is_local.to(grad_logits.dtype))
    share = distillation.divergence * temperature
    grad_logits += student_weights.mul_((share / student_total)[:, None])
    grad_logits -= teacher_weights.mul_((share / teacher_total)[:, None])
    counts = targets != IGNORED
    losses = torch.stack([total.log() - target_logits, divergence])
    return (losses * counts).sum(-1), _multiplied(grad_logits, counts[:, None], slope, hidden.dtype)


def _target_logits(
    logits: Tensor, targets: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Target logits (T,), 0 if on other ranks; their columns (T, 1), and whether they are on this rank (T, 1)."""
    rows = logits.shape[-1]
    first = 0 if group is None else dist.get_rank(group) * rows
    columns = targets[:, None] - first
    is_local = (columns >= 0) & (columns < rows)
    columns = columns.where(is_local, 0)
    return logits.gather(-1, columns).where(is_local, 0)[:, 0], columns, is_local


def _max_logits(logits: list[Tensor], group: ProcessGroup | None) -> Tensor:
    """The largest logit per token over all ranks, (len(logits), T, 1)."""
    largest = torch.stack([part.amax(-1, keepdim=True) for part in logits])
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def _all_reduced(parts: list[Tensor], group: ProcessGroup | None) -> Tensor:
    """The parts (T,) summed over all ranks, (len(parts), T)."""
    sums = torch.stack(parts)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
