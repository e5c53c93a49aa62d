"""Histograms of weights, gradients and gates, whatever layout shares them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from megakernel.attention.near_far import NearFarAttention
from megakernel.parallel import Mesh
from megakernel.training.engine import Engine
from megakernel.training.optimizer import counts_here

from .histograms import SHARES, SIGNED, Histogram

Found = dict[str, Histogram]


class ModelHistograms:
    """Takes histograms in steps that are multiples of `every`; all ranks call alike.

    weights/NAME: of every trained weight in float32, before the step's update.
    gradients/NAME: of the whole batch, before clipping. What is not finite is left out.
    gates/LAYER: the near window's share of each output, of heads (and of the tokens of the step's last micro-batch).
    NAME is the name in a checkpoint. A tensor that ranks share is counted shard by shard, a copy once.

    ZeRO has every rank hold a part of each gradient. DeepSpeed's own reader puts one tensor after the other together,
    on all ranks of a replica group: an all-reduce of as many bytes as the weights take in float32, in these steps only.

    excluded: put around time that is no part of a step.
    """

    def __init__(
        self, engine: Engine, every: int | None, excluded: Callable[[], AbstractContextManager[None]]
    ):
        self._engine = engine
        self._mesh = engine.mesh
        self._every = every
        self._excluded = excluded

    @contextmanager
    def step(self, step: int, found: Found) -> Iterator[None]:
        """Around training step `step`, counted from 1; adds to `found` on rank 0."""
        if self._every is None or step % self._every:
            yield
            return
        own: Found = {}

        def look() -> None:
            with self._excluded():
                own.update(self._parameters())

        with ExitStack() as stack:
            gates = stack.enter_context(_gates(self._engine.engine.module, self._mesh))
            stack.enter_context(self._engine.before_update(look))
            yield
        own.update(gates)
        with self._excluded():
            parts = self._mesh.gather_objects(own)
        if self._mesh.rank == 0:
            for part in parts:
                for tag, histogram in part.items():
                    total = found.setdefault(tag, Histogram())
                    total += histogram

    @torch.no_grad()
    def _parameters(self) -> Found:
        found: Found = {}
        for name, parameter in self._engine.engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            # Every rank of the replica group asks, in the same order: these are collectives.
            weight, gradient = safe_get_full_fp32_param(parameter), safe_get_full_grad(parameter)
            if self._mesh.gradient.rank > 0 or not counts_here(parameter, self._mesh):
                continue
            found[f"weights/{name}"] = _histogram(parameter if weight is None else weight)
            if gradient is not None:
                found[f"gradients/{name}"] = _histogram(gradient)
        return found


def _histogram(values: Tensor) -> Histogram:
    histogram = Histogram()
    histogram.add(values, SIGNED)
    return histogram


@contextmanager
def _gates(model: nn.Module, mesh: Mesh) -> Iterator[Found]:
    """The gates of the forward passes within, filled in as they run."""
    found: Found = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        @torch.no_grad()
        def look(core: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(core, NearFarAttention)
            gate = core.gate(arguments[0])
            if gate is None or (
                gate.dim() == 2 and mesh.gradient.rank > 0
            ):  # without tokens all replicas agree
                return
            # The last pass stands for all: backward may run a pass again, and would count its tokens twice.
            found[f"gates/{name}"] = histogram = Histogram()
            histogram.add(gate.sigmoid(), SHARES)

        return look

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, NearFarAttention):
                handle = module.register_forward_pre_hook(hook(name))
                stack.callback(handle.remove)
        yield found
