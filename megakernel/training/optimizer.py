"""AdamW, its parameter groups, and global-norm clipping where DeepSpeed brings none of its own."""

import math
from typing import Any

import torch
from torch import nn

from megakernel import config as configuration
from megakernel.parallel import Mesh


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices of projections, MLPs and embeddings decay; norms, biases and all that a mechanism owns do not."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 leaves an empty tensor behind
        mechanism = ".core." in name
        (free if mechanism or len(shape) < 2 else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips by the global gradient norm and passes over a step whose norm is not finite.

    DeepSpeed does both inside its ZeRO and bfloat16 optimizers. Its plain float32 path does not: it leaves
    non-finite gradients in, reports no norm, and on later pipeline stages leaves the norms' weights out. So for
    float32 without ZeRO this class does it, and tells the engine through the attributes that the engine reads:
    `_global_grad_norm` and `overflow`.
    """

    def __init__(self, groups: list[dict], mesh: Mesh, max_norm: float, **options):
        super().__init__(groups, **options)
        self.mesh = mesh
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        """Clip, then update; a non-finite norm leaves weights and moments as they are."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._global_grad_norm = self._norm().item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return None
        torch._foreach_mul_(gradients, min(1.0, self.max_norm / (self._global_grad_norm + 1e-6)))
        return super().step(closure)

    def _norm(self) -> torch.Tensor:
        """Norm over all tensor ranks and pipeline stages, every weight counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self._counts_here(parameter):
                    squares += parameter.grad.norm(dtype=torch.float32).double() ** 2
        return self.mesh.sum(squares, self.mesh.model).sqrt()

    def _counts_here(self, parameter: nn.Parameter) -> bool:
        if getattr(parameter, "ds_pipe_replicated", False):  # a tied embedding's second copy
            return False
        return self.mesh.tp.rank == 0 or getattr(parameter, "tensor_model_parallel", False)


def build_optimizer(
    model: nn.Module, settings: configuration.Optimizer, mesh: Mesh, deepspeed_clips: bool
) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps; its learning rate is set anew before every step."""
    groups = parameter_groups(model, settings.weight_decay)
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
    }
    if deepspeed_clips:
        return torch.optim.AdamW(groups, **options)
    return ClippedAdamW(groups, mesh, settings.clip_grad_norm, **options)
