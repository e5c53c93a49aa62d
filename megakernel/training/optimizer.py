"""The optimizer with its parameter groups, and gradient clipping where DeepSpeed has none."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megakernel import config as configuration
from megakernel.checkpoint.whole_tensors import MUON
from megakernel.config import UserError
from megakernel.model import Pipeline
from megakernel.model.embedding import LearnedPositions, TokenEmbedding
from megakernel.model.self_attention import UPDATES, absent_in_dense, is_of_mechanism
from megakernel.parallel import Mesh

from .deepspeed_config import deepspeed_clips
from .muon import Matrices, Muon, whole_matrices

LR_SCALE = "share_of_lr"
"""Key of a parameter group: factor of the step's learning rate."""

WHOLE_MATRICES = "matrices of Muon"
"""Name of the group that Muon updates."""


def parameter_groups(model: nn.Module, settings: configuration.Optimizer) -> dict[str, dict[str, Any]]:
    """Groups of trained weights: matrices with weight decay; norms, biases and mechanisms' own weights without.

    Embeddings are matrices with decay_embeddings, else with the norms: stages without embeddings have the same groups.
    Mechanisms' weights are a separate group only if mechanism_lr is set, Muon's matrices with name: muon. Groups have
    names, and at least one weight.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    owned: list[nn.Parameter] = []
    whole: list[nn.Parameter] = []
    muons = {id(weight) for weight in whole_matrices(model)} if settings.name == "muon" else set()
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (TokenEmbedding, LearnedPositions))
        for parameter in module.parameters()
    }
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 leaves an empty tensor behind
        if not parameter.requires_grad:
            continue
        mechanism = is_of_mechanism(name)
        if id(parameter) in muons:
            whole.append(parameter)
        elif mechanism and settings.mechanism_lr is not None:
            owned.append(parameter)
        else:
            kept = id(parameter) in embeddings and not settings.decay_embeddings
            (free if mechanism or kept or len(shape) < 2 else decayed).append(parameter)
    share = (settings.mechanism_lr or settings.lr) / settings.lr
    muon_share = (settings.muon_lr or settings.lr) / settings.lr
    groups: dict[str, dict[str, Any]] = {
        WHOLE_MATRICES: {
            "params": whole,
            "weight_decay": settings.weight_decay,
            LR_SCALE: muon_share,
            MUON: True,
        },
        "matrices": {"params": decayed, "weight_decay": settings.weight_decay, LR_SCALE: 1.0},
        "norms and biases": {"params": free, "weight_decay": 0.0, LR_SCALE: 1.0},
        "weights of mechanisms": {"params": owned, "weight_decay": 0.0, LR_SCALE: share},
    }
    return {name: group for name, group in groups.items() if group["params"]}


def is_trained(config: configuration.Config, name: str) -> bool:
    """Whether the weight `name` is trained."""
    optimizer = config.optimizer
    if config.objective.kind == "transfer":  # all weights around a mechanism are the teacher's
        return is_of_mechanism(name)
    if optimizer.updates is not None and not optimizer.updates.mechanism:
        return UPDATES.search(name) is not None
    return optimizer.trained == "all" or absent_in_dense(name)


def freeze(model: nn.Module, trained: str, select: Callable[[str], bool] = absent_in_dense) -> None:
    """Freeze all weights but those whose names `select` accepts.

    trained: value of optimizer.trained, for the error. Raises UserError if no weight is left to train.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(select(name))
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
    """AdamW that clips by the global gradient norm and skips a step whose norm is not finite.

    For float32 without ZeRO: there DeepSpeed applies non-finite gradients, reports no norm, and on later pipeline
    stages omits norm weights from it. Sets the attributes that its engine reads: `_global_grad_norm` and `overflow`.
    """

    def __init__(self, groups: list[dict], mesh: Mesh, max_norm: float, **options):
        super().__init__(groups, **options)
        self.mesh = mesh
        self.max_norm = max_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        """Clip, then update; skip both if the norm is not finite."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._global_grad_norm = self._norm().item()
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return None
        torch._foreach_mul_(gradients, min(1.0, self.max_norm / (self._global_grad_norm + 1e-6)))
        return super().step(closure)

    def _norm(self) -> torch.Tensor:
        """Gradient norm over all tensor ranks and pipeline stages, each weight counted once."""
        squares = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and is_counted_here(parameter, self.mesh):
                    squares += parameter.grad.norm(dtype=torch.float32).double() ** 2
        return self.mesh.sum(squares, self.mesh.model).sqrt()


class ClippedMuon(ClippedAdamW, Muon):
    """Muon that does the same: clipping precedes its momentum."""


def is_counted_here(parameter: nn.Parameter, mesh: Mesh) -> bool:
    """Whether a sum over all ranks of `mesh.model` that counts each weight once includes this rank's shard."""
    if getattr(parameter, "ds_pipe_replicated", False):  # a tied embedding's second copy
        return False
    return mesh.tp.rank == 0 or getattr(parameter, "tensor_model_parallel", False)


def build_optimizer(model: nn.Module, config: configuration.Config, mesh: Mesh) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed wraps; its learning rate is set before every step. Called on all ranks.

    Raises UserError, alike on all ranks, if pipeline stages have different parameter groups.
    """
    settings = config.optimizer
    groups = parameter_groups(model, settings)
    # With ZeRO DeepSpeed sums norms over the stages group by group.
    stages = dict(mesh.gather_objects((mesh.pp.rank, tuple(groups))))
    if deepspeed_clips(config) and len(set(stages.values())) > 1:
        trained = "; ".join(f"stage {stage}: {', '.join(names)}" for stage, names in sorted(stages.items()))
        raise UserError(
            f"parallel.pipeline={mesh.pp.size}: with optimizer.name={settings.name}, trained={settings.trained} and "
            f"mechanism_lr={settings.mechanism_lr}, stages train different groups of weights ({trained}), over which "
            "DeepSpeed cannot sum norms; set optimizer.mechanism_lr: null, trained: all and name: adamw, or another "
            "parallel.pipeline"
        )
    options: dict[str, Any] = {
        "lr": settings.lr,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        # The fused update makes one memory-bound pass over the weights instead of ten.
        "fused": True,
    }
    adamw: type[torch.optim.AdamW] = torch.optim.AdamW
    clipped: type[ClippedAdamW] = ClippedAdamW
    if WHOLE_MATRICES in groups:
        is_half = config.training.dtype == "bfloat16" and mesh.device.type == "cuda"
        dtype = torch.bfloat16 if is_half else torch.float32
        weights = groups[WHOLE_MATRICES]["params"]
        options |= {"matrices": Matrices(weights, mesh, dtype), "momentum": settings.muon_momentum}
        adamw, clipped = Muon, ClippedMuon
    if deepspeed_clips(config):
        return adamw(list(groups.values()), **options)
    return clipped(list(groups.values()), mesh, settings.clip_grad_norm, **options)
