"""Norms that support sequence parallelism, which Megatron-core's wrapped torch norm does not."""

import torch
from torch import Tensor, nn

from megakernel.ops.layers import add_rms_norm, layer_norm, rms_norm, rms_norm_and_residual
from megakernel.parallel import all_reduce, replicated
from megakernel.parallel.axis import Axis
from megakernel.parallel.partition import Partition

from .settings import ModelSettings


def _weight(settings: ModelSettings, width: int) -> tuple[nn.Parameter, float]:
    """A norm's weight and the offset added to it, together initially 1."""
    offset = 1.0 if settings.model.zero_centered_norm else 0.0
    return nn.Parameter(torch.full((width,), 1.0 - offset)), offset


class HeadNorm(nn.Module):
    """RMSNorm per head, with one weight vector for the heads of all tensor ranks."""

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.eps = settings.model.norm_eps
        self.group = settings.mesh.tp.group if settings.mesh.tp.size > 1 else None
        self.weight, self.offset = _weight(settings, settings.model.head_size)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., head_dim) -> the same shape and dtype."""
        return rms_norm(x, replicated(self.weight, self.group), self.eps, self.offset)


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads of a token together, on all tensor ranks; each rank has the weights of its heads."""

    def __init__(self, settings: ModelSettings, heads: int, copies: Axis | None = None):
        """heads: heads of the whole layer. copies: the tensor ranks that hold this rank's heads; None: this one."""
        super().__init__()
        tp = settings.mesh.tp
        self.eps = settings.model.norm_eps
        self.group = tp.group if tp.size > 1 else None
        held = copies.size if copies else 1
        self.copies_group = copies.group if copies else None
        self.width = held * heads * settings.model.head_size
        """Numbers of all tensor ranks whose squares are summed."""
        self.weight, self.offset = _weight(settings, self.width // tp.size)
        Partition(0, copies=held).mark(self.weight, tp.rank)

    def forward(self, x: Tensor) -> Tensor:
        """x (N, B, H_kv, heads of each, head_dim) -> the same shape and dtype; computed in float32 or better."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = exact.square().sum((2, 3, 4), keepdim=True)
        if self.group is not None:
            squares = all_reduce(squares, self.group)
        weight = replicated(self.weight, self.copies_group).to(exact.dtype).view(x.shape[2:]) + self.offset
        return (exact * torch.rsqrt(squares / self.width + self.eps) * weight).to(x.dtype)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in float32.

    Under sequence parallelism the gradients of the replicated weights are summed over the tensor ranks.
    """

    def __init__(self, settings: ModelSettings):
        super().__init__()
        self.kind = settings.model.norm
        self.eps = settings.model.norm_eps
        self.group = settings.mesh.tp.group if settings.mesh.sequence_parallel else None
        self.weight, self.offset = _weight(settings, settings.model.hidden_size)
        self.bias = (
            nn.Parameter(torch.zeros(settings.model.hidden_size)) if self.kind == "layernorm" else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x (..., hidden_size) -> the same shape and dtype."""
        weight = replicated(self.weight, self.group)
        if self.kind == "rmsnorm":
            return rms_norm(x, weight, self.eps, self.offset)
        assert self.bias is not None
        return layer_norm(x, weight, replicated(self.bias, self.group), self.eps)

    def and_residual(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x for the residual path, and its norm; backward of an RMSNorm adds both gradients of x in one pass."""
        if self.kind != "rmsnorm":
            return x, self(x)
        normed, residual = rms_norm_and_residual(
            x, replicated(self.weight, self.group), self.eps, self.offset
        )
        return residual, normed

    def of_sum(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """residual + x and its norm, which an RMSNorm computes in one pass over the tokens on a GPU."""
        if self.kind != "rmsnorm":
            total = residual + x
            return total, self(total)
        weight = replicated(self.weight, self.group)
        normed, total = add_rms_norm(x, residual, weight, self.eps, self.offset)
        return total, normed
