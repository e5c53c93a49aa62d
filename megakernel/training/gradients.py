"""Gradients under ZeRO 1 in bfloat16: how they are summed; each rank reduces, measures and clips those that it updates
weights with."""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor
from torch.nn.utils import get_total_norm

from megakernel.parallel import Mesh

from .optimizer import is_counted_here


class OwnGradients:
    """Replaces how a DeepSpeed engine with a BF16_Optimizer sums, reduces, measures and clips gradients.

    A weight's first gradient of a step is copied into its float32 sum, later ones are added there, each in one pass.
    DeepSpeed fills all sums with zeros twice a step, and adds float32 copies of the gradients.

    A rank updates one partition of the flat weights: a reduce-scatter in place of those gradients sends half as many
    bytes as DeepSpeed's all-reduce of all of them, through copies.
    """

    def __init__(self, optimizer: BF16_Optimizer, mesh: Mesh):
        self._group = mesh.gradient
        self._sums: list[list[Tensor]] = optimizer.fp32_groups_gradients
        self._has_gradient: list[list[bool]] = optimizer.fp32_groups_has_gradients
        """Whether the sum has a gradient of this step; otherwise its contents are those of an earlier step."""
        self._whole: list[Tensor] = optimizer.fp32_groups_gradients_flat
        self._own: list[Tensor] = optimizer.fp32_groups_gradient_flat_partition
        self._counted: list[Tensor] = []
        """The parts of gradients in this rank's partition whose weights count in the norm here."""
        for weights, gradients, own in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, self._own):
            begin, end = own.storage_offset(), own.storage_offset() + own.numel()
            for weight, gradient in zip(weights, gradients):
                first = max(begin - gradient.storage_offset(), 0)
                stop = min(end - gradient.storage_offset(), gradient.numel())
                if first < stop and is_counted_here(weight, mesh):
                    self._counted.append(gradient[first:stop])

    @classmethod
    def install(cls, engine: Any, mesh: Mesh) -> None:
        """Replace DeepSpeed's methods, once after deepspeed.initialize; other optimizers are left as they are."""
        optimizer = engine.optimizer
        if not isinstance(optimizer, BF16_Optimizer):
            return
        gradients = cls(optimizer, mesh)
        optimizer._update_hp_grad = gradients.add
        optimizer.clear_hp_grads = gradients.clear
        engine.buffered_allreduce_fallback = gradients.reduce
        optimizer.get_grads_for_norm = gradients.for_norm
        optimizer.mpu = _AllRanks()

    @torch.no_grad()
    def add(self, weight: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        """Add a weight's gradient to its float32 sum. group, index: its place in the optimizer."""
        assert not clear_lp_grads, "the caller frees the gradient"
        if weight.grad is None:
            return
        total = self._sums[group][index]
        write = total.view_as(weight.grad)
        if self._has_gradient[group][index]:
            write.add_(weight.grad)
        else:
            write.copy_(weight.grad)
        self._has_gradient[group][index] = True
        weight._hp_grad = total  # what DeepSpeed's pipeline engine sums over the stages that share a weight

    def clear(self) -> None:
        """Begin the sums of a step."""
        for flags in self._has_gradient:
            flags[:] = [False] * len(flags)

    def reduce(self, grads: None = None, elements_per_buffer: int | None = None) -> None:
        """Average this rank's partition over the ranks of `mesh.gradient`; the other partitions are then partial."""
        for totals, flags in zip(self._sums, self._has_gradient):
            for total, has_gradient in zip(totals, flags):
                if not has_gradient:  # a weight that the batch did not use
                    total.zero_()
        if self._group.size == 1:
            return
        for own, whole in zip(self._own, self._whole):
            dist.reduce_scatter_tensor(own, whole, group=self._group.group)
            own.div_(self._group.size)

    def for_norm(self, for_clipping: bool = False) -> Any:
        """The gradients to clip; else a tensor with their norm on this rank, and those of experts, which are none."""
        return self._own if for_clipping else ([get_total_norm(self._counted, foreach=True)], {})


class _AllRanks:
    """The `mpu` by which the optimizer sums squares of norms: every rank has measured other gradients."""

    def get_model_parallel_group(self) -> None:
        """All ranks."""
