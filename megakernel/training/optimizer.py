"""AdamW, its parameter groups, and global-norm clipping where DeepSpeed brings none of its own."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megakernel import config as configuration
from megakernel.config import UserError
from megakernel.model import Pipeline
from megakernel.model.self_attention import MECHANISM, UPDATES, is_new
from megakernel.parallel import Mesh

SHARE = "share_of_lr"
"""Of a parameter group: what the step's learning rate is multiplied by."""


def parameter_groups(model: nn.Module, settings: configuration.Optimizer) -> list[dict[str, Any]]:
    """Matrices of projections, MLPs and embeddings decay; norms, biases and all that a mechanism owns do not.

    What a mechanism owns is a group of its own where it has a learning rate of its own, and there alone.
    Weights without gradient are in no group.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    owned: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 leaves an empty tensor behind
        if not parameter.requires_grad:
            continue
        mechanism = MECHANISM in name
        if mechanism and settings.mechanism_lr is not None:
            owned.append(parameter)
        else:
            (free if mechanism or len(shape) < 2 else decayed).append(parameter)
    share = (settings.mechanism_lr or settings.lr) / settings.lr
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": settings.weight_decay, SHARE: 1.0},
        {"params": free, "weight_decay": 0.0, SHARE: 1.0},
        {"params": owned, "weight_decay": 0.0, SHARE: share},
    ]
    return [group for group in groups if group["params"]]


def learns(config: configuration.Config, name: str) -> bool:
    """Whether a weight of this name is one that optimizer.trained names."""
    optimizer = config.optimizer
    if config.objective.kind == "transfer":  # what is around a mechanism is the teacher's
        return MECHANISM in name
    if optimizer.updates is not None and not optimizer.updates.mechanism:
        return UPDATES.search(name) is not None
    return optimizer.trained == "all" or is_new(name)


def freeze(model: nn.Module, trained: str, is_trained: Callable[[str], bool] = is_new) -> None:
    """Let the weights whose names `is_trained` takes have gradients, and no others. trained: as it is configured.

    Raises UserError where there is none.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        is_stage = isinstance(model, Pipeline)
        layers = (
            "a stage of parallel.pipeline has model.attention with" if is_stage else "model.attention has"
        )
        raise UserError(
            f"optimizer.trained={trained} and {layers} no weights of its own; take a feature map that "
            "learns, such as feature_map: {name: hedgehog}, or leave the stage out (uptrain.transfer: null)"
        )


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
                if parameter.grad is not None and counts_here(parameter, self.mesh):
                    squares += parameter.grad.norm(dtype=torch.float32).double() ** 2
        return self.mesh.sum(squares, self.mesh.model).sqrt()


def counts_here(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Whether this rank's shard of a weight counts where all ranks of `mesh.model` add up and copies count once."""
    if getattr(parameter, "ds_pipe_replicated", False):  # a tied embedding's second copy
        return False
    return mesh.tp.rank == 0 or getattr(parameter, "tensor_model_parallel", False)


def build_optimizer(
    model: nn.Module, settings: configuration.Optimizer, mesh: Mesh, deepspeed_clips: bool, on_cpu: bool
) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps; its learning rate is set anew before every step. Called on all ranks.

    on_cpu: where it finds the weights, which DeepSpeed may have moved there.

    Raises UserError, alike on all ranks, where pipeline stages have not as many groups of weights.
    """
    groups = parameter_groups(model, settings)
    # DeepSpeed adds up norms over the stages group by group.
    if len(set(mesh.gather_objects(len(groups)))) > 1:
        raise UserError(
            f"parallel.pipeline={mesh.pp.size}: attention layers own weights on some stages and none on others, which "
            f"optimizer.trained={settings.trained} and mechanism_lr={settings.mechanism_lr} train apart from the rest; "
            "set optimizer.mechanism_lr: null and optimizer.trained: all, or another parallel.pipeline"
        )
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        # One pass over the weights where a CPU takes ten, each as long as reading them from memory.
        "fused": on_cpu,
    }
    if deepspeed_clips:
        return torch.optim.AdamW(groups, **options)
    return ClippedAdamW(groups, mesh, settings.clip_grad_norm, **options)
