"""Muon: momentum whose direction is orthogonalized matrix by matrix; AdamW for all other weights.

A matrix is updated as a whole, in any layout. Each rank has the momentum of the weights that its optimizer updates:
whole weights without ZeRO, a partition of the flat weights with ZeRO 1 and 2, of the tensor rank's shards. The
directions of a matrix that several ranks have parts of are put together before they are orthogonalized.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megakernel.checkpoint.whole_tensors import MOMENTS, MUON, STEP
from megakernel.model.layer import layer_matrices
from megakernel.model.linear import stacked_rows
from megakernel.parallel import Mesh
from megakernel.parallel.partition import Partition

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: an odd polynomial that, applied _STEPS times, takes singular values from 0.005 to 1 to about 1."""

_STEPS = 5

_RMS = 0.2
"""Root mean square of the entries of an update: about that of AdamW's, so that lr and weight_decay mean the same."""


def whole_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights that Muon trains: projections of attention and MLP in the blocks; sharded over tensor ranks."""
    return [linear.weight for linear in layer_matrices(model)]


def orthogonalized(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of a matrix (R, C) = U S V^T, approximately: singular values between about 0.7 and 1.2. Newton-Schulz.

    dtype: of the products; the result has the matrix's.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix / (matrix.norm() + 1e-20)).to(dtype)  # 0 stays 0
    x = x.T if is_tall else x
    for _ in range(_STEPS):
        squares = x @ x.T
        x = a * x + (b * squares + c * squares @ squares) @ x
    return (x.T if is_tall else x).to(matrix.dtype)


class _Place(NamedTuple):
    """The part of a weight that is in this rank's flat partition."""

    of_weight: slice
    of_partition: slice


class Matrices:
    """The matrices of Muon's weights on this rank, and where they are in what its optimizer updates."""

    def __init__(self, weights: Sequence[nn.Parameter], mesh: Mesh, dtype: torch.dtype):
        """weights: of this rank, in the optimizer's order. dtype: of the products that orthogonalize."""
        self._weights = weights
        self._mesh = mesh
        self._dtype = dtype

    def update(self, updated: Tensor, direction: Tensor) -> Tensor:
        """Muon's update for a direction, before the learning rate; called on all ranks.

        updated: the tensor of the optimizer: a weight or, with ZeRO, the flat partition of all. direction: as large.
        """
        if not self._is_partitioned:
            return self._update(updated, direction)
        update = torch.zeros_like(direction)
        for weight, place, is_split in zip(self._weights, self._places, self._are_split, strict=True):
            flat = direction.new_zeros(weight.numel()) if is_split else None
            if place is not None:
                part = direction[place.of_partition]
                if flat is None:
                    flat = part
                else:
                    flat[place.of_weight] = part
            if is_split:  # all ranks take part, also those that have nothing of it
                dist.all_reduce(flat, group=self._mesh.gradient.group)
            if place is not None:
                assert flat is not None
                whole = self._update(weight, flat.view(weight.shape))
                update[place.of_partition] = whole.flatten()[place.of_weight]
        return update

    def _update(self, weight: Tensor, direction: Tensor) -> Tensor:
        """The update of a tensor rank's shard of a weight; called on all tensor ranks."""
        tp, partition = self._mesh.tp, Partition.of(weight)
        if tp.size == 1 or partition.dimension is None:
            return self._of_whole(weight, direction)
        shards = direction.new_empty(tp.size * len(direction), *direction.shape[1:])
        dist.all_gather_into_tensor(shards, direction.contiguous(), group=tp.group)
        whole = partition.join(shards.chunk(tp.size))
        return partition.shard(self._of_whole(weight, whole), tp.rank, tp.size)

    def _of_whole(self, weight: Tensor, direction: Tensor) -> Tensor:
        """The update of a whole weight (R, C): each of the matrices that are stacked in it on its own."""
        rows = stacked_rows(weight) or (len(direction),)
        stacked = direction.view(-1, sum(rows), direction.shape[1]).split(rows, 1)
        updates = []
        for part in stacked:
            matrix = part.flatten(0, 1)
            scale = _RMS * max(matrix.shape) ** 0.5  # U V^T has a mean square of 1 / max(R, C)
            updates.append((scale * orthogonalized(matrix, self._dtype)).view_as(part))
        return torch.cat(updates, 1).view_as(direction)

    @cached_property
    def _is_partitioned(self) -> bool:
        return any(hasattr(weight, "_hp_mapping") for weight in self._weights)

    @cached_property
    def _places(self) -> list[_Place | None]:
        """Where the part of each weight is that this rank updates; None: nowhere."""
        places: list[_Place | None] = []
        for weight in self._weights:
            mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                places.append(None)
                continue
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            places.append(
                _Place(
                    slice(here.start, here.start + here.numel), slice(there.start, there.start + there.numel)
                )
            )
        return places

    @cached_property
    def _are_split(self) -> list[bool]:
        """For each weight, whether several ranks update parts of it; found by all ranks together."""
        here = torch.tensor([place is not None for place in self._places], dtype=torch.int64)
        counts = self._mesh.sum(here.to(self._mesh.device), self._mesh.gradient)
        return [count > 1 for count in counts.tolist()]


class Muon(torch.optim.AdamW):
    """Muon for the parameter group with the key MUON, AdamW for the others.

    Its state has the names of AdamW's, so that checkpoints are alike: the momentum is `exp_avg`, and there is no second
    moment.
    """

    def __init__(self, groups: list[dict], matrices: Matrices, momentum: float, **options):
        super().__init__(groups, **options)
        self.matrices = matrices
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure=None):
        """Update all weights. With ZeRO 1 and 2 DeepSpeed calls it once for each group."""
        stepped = [p for group in self.param_groups if group.get(MUON) for p in group["params"]]
        gradients = [p.grad for p in stepped]
        for p in stepped:  # AdamW leaves out what has no gradient
            p.grad = None
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"] if group.get(MUON) else ():
                p.grad = gradients.pop(0)
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state[STEP] = torch.zeros((), dtype=torch.float32, device=p.device)
            state[MOMENTS[0]] = torch.zeros_like(p)
        state[STEP] += 1
        momentum = state[MOMENTS[0]].lerp_(gradient, 1 - self.momentum)
        update = self.matrices.update(p, gradient.lerp(momentum, self.momentum))  # Nesterov's
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
