"""Histograms of weights, gradients and gates, on any layout."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from megakernel.attention.near_far import NearFarAttention
from megakernel.parallel import Mesh
from megakernel.training.engine import Engine
from megakernel.training.optimizer import is_counted_here

from .histograms import SHARES, SIGNED, Histogram

Histograms = dict[str, Histogram]


class ModelHistograms:
    """Computes histograms in steps that are multiples of `every`; called on all ranks.

    weights/NAME: every trained weight in float32, before the step's update; NAME is the name in a checkpoint.
    gradients/NAME: its gradient of the whole batch, before clipping. Non-finite values are left out.
    gates/LAYER: the near window's share of the output, per head (and per token of the step's last micro-batch).
    Shards of a tensor are counted separately and added, copies once.

    ZeRO shards gradients; DeepSpeed's reader gathers one tensor after the other on all ranks of a replica group. In
    these steps that is an all-reduce of as many bytes as the weights have in float32.

    excluded: context manager for time that is not part of a step.
    """

    def __init__(
        self, engine: Engine, every: int | None, excluded: Callable[[], AbstractContextManager[None]]
    ):
        self._engine = engine
        self._mesh = engine.mesh
        self._every = every
        self._excluded = excluded

    @contextmanager
    def step(self, step: int, found: Histograms) -> Iterator[None]:
        """Wraps training step `step`, counted from 1; adds to `found` on rank 0."""
        if self._every is None or step % self._every:
            yield
            return
        local: Histograms = {}

        def record() -> None:
            with self._excluded():
                local.update(self._parameters())

        with ExitStack() as stack:
            gates = stack.enter_context(_gates(self._engine.engine.module, self._mesh))
            stack.enter_context(self._engine.before_update(record))
            yield
        local.update(gates)
        with self._excluded():
            parts = self._mesh.gather_objects(local)
        if self._mesh.rank == 0:
            for part in parts:
                for tag, histogram in part.items():
                    total = found.setdefault(tag, Histogram())
                    total += histogram

    @torch.no_grad()
    def _parameters(self) -> Histograms:
        found: Histograms = {}
        for name, parameter in self._engine.engine.module.named_parameters():
            if not parameter.requires_grad:
                continue
            # Collectives, which every rank of the replica group calls in the same order.
            weight, gradient = safe_get_full_fp32_param(parameter), safe_get_full_grad(parameter)
            if self._mesh.gradient.rank > 0 or not is_counted_here(parameter, self._mesh):
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
def _gates(model: nn.Module, mesh: Mesh) -> Iterator[Histograms]:
    """Histograms of the gates, filled by the forward passes within the block."""
    found: Histograms = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        @torch.no_grad()
        def record(core: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(core, NearFarAttention)
            gate = core.gate(arguments[0])
            # A gate per head is equal on all replicas.
            if gate is None or (gate.dim() == 2 and mesh.gradient.rank > 0):
                return
            # Only the last forward pass is kept: recomputation in backward would count tokens twice.
            found[f"gates/{name}"] = histogram = Histogram()
            histogram.add(gate.sigmoid(), SHARES)

        return record

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, NearFarAttention):
                handle = module.register_forward_pre_hook(hook(name))
                stack.callback(handle.remove)
        yield found
